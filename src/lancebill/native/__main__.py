"""`python -m lancebill.native` builds the CPU kernels in place."""

from lancebill.native.build import main

main()
