"""Pictures and traces for all jobs. Code that only draws or exports belongs here."""
