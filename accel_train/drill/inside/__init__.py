"""The part of a drill inside of the processes of the recipe: what is asked for, and how it is injected."""
