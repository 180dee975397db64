"""Pictures and traces for all jobs: code that only draws or exports."""
