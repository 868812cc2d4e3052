"""How commands speak with people: options and errors, progress, notices, seconds, Ray itself."""
