"""Atomic publishing of files, locks and leases between processes, file permissions, and digests. This package does not
know the contents of files."""
