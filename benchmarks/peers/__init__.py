"""What a user could pick instead of Weightstream, each as its users would run it: a module measures one library and is
run as a worker (`answers`), where need be in a virtual environment that has that library.
"""
