"""`python -m lancebill.backends.cpu.native` builds the CPU kernels in place."""

from lancebill.backends.cpu.native.build import main

main()
