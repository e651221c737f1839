"""The part of a drill inside the processes of the recipe: the request for a fault, and its injection."""
