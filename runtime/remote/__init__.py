"""Files of object stores, by their URLs: brought here whole, taken there whole, tried again where a store fails. Here
belongs what talks to such a store; what a file means, its caller knows.
"""
