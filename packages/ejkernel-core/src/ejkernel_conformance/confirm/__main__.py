"""`python3 -m ejkernel_conformance.confirm`."""

from ejkernel_conformance.confirm.command import main

if __name__ == "__main__":
    main()
