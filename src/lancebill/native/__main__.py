"""`python -m lancebill.native` builds the C++ libraries in place."""

from lancebill.native.build import main

main()
