// What headers of GCC 11 and later ask of the C++ library and that of GCC 8, which manylinux_2_28 has, lacks.

#include <new>

namespace std {

void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
