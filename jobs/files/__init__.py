"""Atomic publishing of files, locks and leases between processes, permissions and digests. Knows no file contents."""
