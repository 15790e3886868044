// What the FFI handlers of the chunked delta rule share.
#pragma once

#include "common/ffi_handler.cuh"
#include "delta_rule/tensor_maps.cuh"

namespace ejkernel::delta_rule {

// Defines the symbol of a handler some of whose results are memory that its kernels pass on to each other. XLA may put no
// such call into a CUDA graph: nothing reads these results, so calls of one graph would have them in the same memory, and
// at the same time.
#define EJKERNEL_HANDLER_OUTSIDE_GRAPHS(symbol, function, ...)                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, ejkernel::bind(function, {__VA_ARGS__}))

constexpr HandlerErrors kErrors{"delta rule"};

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

// The table of a packed row's chunks, [chunks + 1, 4], of which there are `chunks`; those of rows follow from the tokens.
// Returns false if its shape does not belong to the call's.
template <typename Call>
bool set_chunks(Call* call, const S32& table, int64_t batch, int64_t tokens) {
  call->tokens = int(tokens), call->chunks = int((tokens + kChunkTokens - 1) / kChunkTokens);
  if (table.element_count() == 0) return true;
  if (count(table) % 4 || batch != 1) return false;
  call->table = reinterpret_cast<const Chunk*>(table.typed_data());
  call->chunks = int(count(table) / 4 - 1);
  return true;
}

}  // namespace ejkernel::delta_rule
