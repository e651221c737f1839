"""The part of a drill inside of the processes of the recipe: the request, and its injection."""
