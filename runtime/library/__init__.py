"""The library's API, `Runtime`. Code that converts inputs to requests and completions to results belongs here."""
