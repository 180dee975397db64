"""Carries bytes between disk, host and device while lanes compute: weights, experts, keys and values, attention on
the CPU. Here belongs what moves bytes that a schedule has ordered, and the device that they go to.
"""
