"""Files in object stores, given by URL: reads and writes with retries, and local copies."""
