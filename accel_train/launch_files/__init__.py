"""Launch files and the launch request, without torch."""
