"""Files of object stores by URL: whole reads and writes with retries, and local copies."""
