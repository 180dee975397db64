"""Transformers classes for models that were only published with remote code, which is never run. Only classes that
transformers lacks belong here."""
