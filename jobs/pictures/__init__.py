"""Pictures and traces that any job may write. Here belongs what draws or exports and decides nothing."""
