"""`python -m colibri.native` builds the CPU kernels in place."""

from colibri.native.build import main

main()
