// What headers of GCC 11 and later ask of the C++ library and that of GCC 8, which manylinux_2_28 has, lacks.

#include <new>
#include <sstream>

// Its constructor without arguments came with GCC 9.
template class std::basic_stringstream<char>;

namespace std {

void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
