"""`python -m weightstream`: the same as the command `weightstream`."""

from jobs.__main__ import main

if __name__ == "__main__":
    main()
