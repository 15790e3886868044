"""A plugin whose toolchain is broken."""

raise RuntimeError("libbroken.so: cannot open shared object file")
