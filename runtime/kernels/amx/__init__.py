"""Linear layers and decode attention on the CPU's matrix unit (Intel AMX). Code that uses its registers, called tiles,
belongs here."""
