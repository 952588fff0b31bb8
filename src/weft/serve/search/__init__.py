"""The document `search`: fronts, all that was scored, choices, and the course of a mixture."""
