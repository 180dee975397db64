"""The library's API, `Runtime`, and the code that converts inputs to requests and completions to results."""
