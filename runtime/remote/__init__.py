"""Files in object stores, by URL: reads and writes with retries, and local copies."""
