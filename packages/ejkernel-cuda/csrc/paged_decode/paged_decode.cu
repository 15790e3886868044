// The XLA FFI handler of the paged decoding kernels.
#include <algorithm>

#include "paged_decode/call.cuh"
#include "paged_decode/paged_write.cuh"

namespace ejkernel::paged_decode {
namespace {

constexpr HandlerErrors kErrors{"paged decode"};

template <typename CacheT>
ffi::Error launch_for_size(cudaStream_t stream, const CacheWriteParams& write, int blocks) {
  const PagedDecodeParams& call = write.call;
  const cudaError_t error = call.writes_cache ? launch_write(stream, write) : cudaSuccess;
  if (error != cudaSuccess) return kErrors.check("write", error);
  return dispatch_head_dimension(std::max(call.size, call.value_size), [&](auto size) {
    return kErrors.check("launch", launch_paged<size.value, CacheT>(stream, call, blocks));
  });
}

ffi::Error launch_for_cache(cudaStream_t stream, const Arguments& a, const CacheWriteParams& write, int blocks) {
  const auto query = a.query.element_type(), cache = a.keys.element_type();
  switch (cache) {
    case ffi::F8E4M3FN: return launch_for_size<E4m3>(stream, write, blocks);
    case ffi::F8E5M2: return launch_for_size<E5m2>(stream, write, blocks);
    case ffi::S8: return launch_for_size<Int8>(stream, write, blocks);
    case ffi::BF16:
      if (query == cache) return launch_for_size<__nv_bfloat16>(stream, write, blocks);
      break;
    case ffi::F16:
      if (query == cache) return launch_for_size<__half>(stream, write, blocks);
      break;
    default: break;
  }
  return kErrors.invalid("the dtype of the cache is not supported");
}

// Checks a call and fills its record; its cache is the one in the arguments.
ffi::Error make_call(const Arguments& a, PagedDecodeParams& call) {
  if (a.strides.size() != 7 || a.query.dimensions().size() != 3 || a.output.dimensions().size() != 3) {
    return kErrors.invalid("strides wants seven elements, and query and output want three axes");
  }
  const auto query = a.query.element_type();
  if ((query != ffi::BF16 && query != ffi::F16) || a.output.element_type() != query) {
    return kErrors.invalid("query and output are not both bfloat16 or both float16");
  }
  if (a.values.element_type() != a.keys.element_type()) return kErrors.invalid("keys and values differ in dtype");
  call = make_params(a);
  const bool fits = shapes_match(
      a, call, a.flags.element_count() / 4, kHeadsPerBlock, call.size, call.value_size);
  return fits ? ffi::Error::Success() : kErrors.invalid_shapes();
}

// Copies a cache array to the result that aliases it, if XLA did not alias them: it does not where the operand is a
// slice of another array.
cudaError_t copy_unless_aliased(cudaStream_t stream, const ffi::AnyBuffer& from, ffi::AnyBuffer& to) {
  if (from.untyped_data() == to.untyped_data()) return cudaSuccess;
  return cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

// Adds the new tokens to a call whose cache pointers already are those of the results.
ffi::Error set_new_tokens(
    CacheWriteParams& write, const Arguments& a, const ffi::AnyBuffer (&tokens)[2], int32_t cache_heads) {
  const PagedDecodeParams& call = write.call;
  const ffi::AnyBuffer caches[2] = {a.keys, values_of(a)};
  const int sizes[2] = {call.size, call.value_size};
  const unsigned char* pages[2] = {call.keys, call.values};
  const Strides strides[2] = {call.key_strides, call.value_strides};
  const int64_t bytes = ffi::ByteWidth(a.keys.element_type());
  PagedDecodeParams padded = call;
  padded.kv_heads = cache_heads;
  for (int n = 0; n < 2; ++n) {
    // head dimension of the cache, which may be padded beyond that of a token
    const int64_t row = caches[n].dimensions().back();
    if (tokens[n].element_type() != caches[n].element_type() ||
        int64_t(tokens[n].element_count()) != int64_t(call.rows) * call.kv_heads * sizes[n] || row < sizes[n] ||
        row * bytes % 16 != 0 || cache_heads < call.kv_heads || !array_covers_strides(padded, caches[n], a.strides,
            n * 3, row)) {
      return kErrors.invalid("the shapes of new tokens and cache do not match");
    }
    write.sources[n] = {
        static_cast<const uint4*>(tokens[n].untyped_data()),
        reinterpret_cast<uint4*>(const_cast<unsigned char*>(pages[n])), strides[n], int(sizes[n] * bytes / 16),
        int(row * bytes / 16)};
  }
  write.heads = cache_heads;
  write.call.writes_cache = true;
  return ffi::Error::Success();
}

// Extra operands are new keys and values; extra results are the cache arrays that they are written into.
ffi::Error paged_decode(
    cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
    ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> starts,
    ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> num_valid_seqs, ffi::Buffer<ffi::F32> sinks,
    ffi::RemainingArgs tokens, ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::Buffer<ffi::F32>> lse,
    ffi::Result<ffi::Buffer<ffi::F32>> partial, ffi::Result<ffi::Buffer<ffi::F32>> statistics,
    ffi::Result<ffi::Buffer<ffi::S32>> flags, ffi::RemainingRets writes_cache, ffi::Span<const int64_t> strides,
    int32_t kv_heads, int32_t cache_heads, int32_t pages, int32_t page_size, int32_t num_queues, int32_t left,
        int32_t right,
    float scale, float cap, float value_scale) {
  if (output->element_count() == 0) return ffi::Error::Success();
  Arguments arguments{query,   keys,     values,    tables, lengths, starts, query_start, num_valid_seqs,  sinks,
                      *output, *lse,     *partial,  *statistics, *flags, strides, kv_heads, pages, page_size,
                      num_queues,   left,     right,     scale,  cap,     value_scale};
  CacheWriteParams write{};
  ffi::AnyBuffer* const caches[2] = {&arguments.keys, &arguments.values};
  for (size_t n = 0; n < writes_cache.size(); ++n) {
    ffi::AnyBuffer to = **writes_cache.get<ffi::AnyBuffer>(n);
    if (n > 1 || to.element_type() != caches[n]->element_type() || to.size_bytes() != caches[n]->size_bytes()) {
      return kErrors.invalid("an updated cache wants the shape and dtype of the cache");
    }
    const cudaError_t copied = copy_unless_aliased(stream, *caches[n], to);
    if (copied != cudaSuccess) return kErrors.check("copy", copied);
    *caches[n] = to;
  }
  ffi::Error error = make_call(arguments, write.call);
  if (error.failure()) return error;
  const size_t arrays = values.element_count() == 0 ? 1 : 2;
  if (tokens.size() != (writes_cache.size() == 0 ? 0 : 2) || (writes_cache.size() != 0 &&
      writes_cache.size() != arrays)) {
    return kErrors.invalid("wants both new_keys and new_values, and both updated caches as results");
  }
  if (tokens.size() > 0) {
    error = set_new_tokens(
        write, arguments, {*tokens.get<ffi::AnyBuffer>(0), *tokens.get<ffi::AnyBuffer>(1)}, cache_heads);
    if (error.failure()) return error;
  }
  return launch_for_cache(stream, arguments, write, flags->element_count() / 4);
}

}  // namespace

EJKERNEL_FFI_HANDLER(
    ejkernel_paged_decode, paged_decode,
    "strides", "kv_heads", "cache_heads", "pages", "page_size", "lines", "left", "right", "scale", "cap",
    "value_scale");

}  // namespace ejkernel::paged_decode
