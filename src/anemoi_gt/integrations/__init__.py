"""Our layers inside models that others wrote; the only room that knows their classes. Each is imported by its own name."""
