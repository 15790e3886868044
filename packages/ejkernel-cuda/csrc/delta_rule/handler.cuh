// What the FFI handlers of the chunked delta rule share.
#pragma once

#include "common/ffi_handler.cuh"
#include "delta_rule/tensor_maps.cuh"

namespace ejkernel::delta_rule {

// Defines the symbol of a handler without the trait that lets XLA capture its calls into CUDA graphs. Some results of
// these handlers are scratch memory, by which one kernel of the call passes data to the next. By XLA's rules that is
// safe in a graph, too: commands that write the same memory run one after the other (docs/lab/cuda_graphs.md). These
// handlers stay outside of graphs until their calls have been measured in graphs.
#define EJKERNEL_HANDLER_OUTSIDE_GRAPHS(symbol, function, ...)                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, ejkernel::bind(function, {__VA_ARGS__}))

constexpr HandlerErrors kErrors{"delta rule"};

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

// Sets the number of chunks and, for packed sequences, their table [chunks + 1, 4], which has one entry more than there
// are chunks. Without packed sequences the table is empty, and the chunks of a row follow from its number of tokens.
// Returns false if the shape of the table does not fit the call.
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
