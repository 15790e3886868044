// The XLA FFI handler of paged decode attention over TurboQuant's codes.
#include "paged_decode/call.cuh"
#include "paged_decode/codes.cuh"

namespace ejkernel::paged_decode {
namespace {

constexpr HandlerErrors kErrors{"paged decode of codes"};
constexpr int kHeads = TileShape<128, Codes<4, 4, 0>>::kHeads;

// The sizes that kernels are compiled for.
template <int HeadDim, int KeyBits, int ValueBits, int Signs>
bool launch_if(
    cudaError_t& error, cudaStream_t stream, CodeDecodeParams call, int key_bits, int value_bits, int blocks) {
  if (call.value_size != HeadDim || call.size != HeadDim + Signs || key_bits != KeyBits || value_bits != ValueBits) {
    return false;
  }
  using Format = Codes<KeyBits, ValueBits, Signs>;
  call.columns_per_round = TileShape<HeadDim, Format>::kKeysPerRound / call.page_size;
  call.slots_per_round = TileShape<HeadDim, Format>::kKeysPerRound % call.page_size;
  error = launch_paged<HeadDim, Format>(stream, call, blocks);
  return true;
}

ffi::Error paged_codes(
    cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
    ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> starts,
    ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> num_valid_seqs, ffi::Buffer<ffi::F32> sinks,
    ffi::Buffer<ffi::U8> signs, ffi::Buffer<ffi::BF16> key_norms, ffi::Buffer<ffi::BF16> value_norms,
    ffi::Buffer<ffi::F32> key_codebook, ffi::Buffer<ffi::F32> value_codebook, ffi::Buffer<ffi::F32> query_map,
    ffi::Buffer<ffi::F32> rotation, ffi::Result<ffi::Buffer<ffi::BF16>> output, ffi::Result<ffi::Buffer<ffi::F32>> lse,
    ffi::Result<ffi::Buffer<ffi::F32>> partial, ffi::Result<ffi::Buffer<ffi::F32>> statistics,
    ffi::Result<ffi::Buffer<ffi::S32>> flags, ffi::Result<ffi::AnyBuffer> rotated_output,
    ffi::Span<const int64_t> strides, int32_t kv_heads, int32_t pages, int32_t page_size, int32_t num_queues,
    int32_t left, int32_t right, float scale, float cap, float value_scale, int32_t key_bits, int32_t value_bits) {
  if (output->element_count() == 0) return ffi::Error::Success();
  if (strides.size() != 7 || query.dimensions().size() != 3 || query_map.dimensions().size() != 2 ||
      rotated_output->dimensions().size() != 3 || query.element_type() != ffi::BF16 ||
      rotated_output->element_type() != ffi::BF16 || keys.element_type() != ffi::U8 ||
      values.element_type() != ffi::U8 || tables.element_count() == 0) {
    return kErrors.invalid("wants seven strides, three axes of bfloat16 queries, uint8 codes, and tables");
  }
  const Arguments arguments{query, keys, values, tables, lengths, starts, query_start, num_valid_seqs, sinks,
                            *rotated_output, *lse, *partial, *statistics, *flags, strides, kv_heads, pages, page_size,
                            num_queues, left, right, scale, cap, value_scale};
  CodeDecodeParams call{};
  static_cast<PagedDecodeParams&>(call) = make_params(arguments);
  const int blocks = flags->element_count() / 4, size = call.value_size;
  const int projections = query_map.dimensions()[0] - size;
  const int64_t tokens = int64_t(pages) * page_size * kv_heads;
  // A page is a run of consecutive tokens.
  const bool pages_are_contiguous = strides[0] == page_size * strides[1] && strides[3] == page_size * strides[4];
  if (!shapes_match(arguments, call, blocks, kHeads, size * key_bits / 8, size * value_bits / 8) ||
      !pages_are_contiguous || call.size != size || projections < 0 || count(*output) != count(query) ||
      count(query_map) != int64_t(size + projections) * size || count(rotation) != int64_t(size) * size ||
      count(signs) != tokens * (projections / 8) || count(key_norms) != tokens * 2 || count(value_norms) != tokens ||
      key_codebook.element_count() == 0 || value_codebook.element_count() == 0) {
    return kErrors.invalid_shapes();
  }
  call.size = size + projections;
  const uint32_t sign_chunks = projections / 128;
  call.signs = data_or_null(signs);
  call.sign_strides = {page_size * kv_heads * sign_chunks, kv_heads * sign_chunks, sign_chunks};
  call.key_norms = static_cast<const uint32_t*>(key_norms.untyped_data());
  call.value_norms = static_cast<const uint16_t*>(value_norms.untyped_data());
  call.key_codebook = key_codebook.typed_data();
  call.value_codebook = value_codebook.typed_data();
  call.key_levels = key_codebook.element_count();
  call.value_levels = value_codebook.element_count();
  call.ones = 0x3f803f80;
  call.final_output = static_cast<uint16_t*>(output->untyped_data());
  call.query_map = query_map.typed_data();
  call.rotation = rotation.typed_data();
  cudaError_t error = cudaSuccess;
  const auto launched = [&](auto launch) { return launch(error, stream, call, key_bits, value_bits, blocks); };
  if (launched(launch_if<128, 4, 4, 0>) || launched(launch_if<128, 4, 4, 128>) || launched(launch_if<128, 3, 4, 128>) ||
      launched(launch_if<128, 2, 3, 128>) || launched(launch_if<128, 1, 2, 128>) || launched(launch_if<128, 3, 3, 0>) ||
      launched(launch_if<128, 2, 2, 0>)) {
    return kErrors.check("launch", error);
  }
  return kErrors.invalid("no kernel is compiled for these bits, signs and head sizes");
}

}  // namespace

EJKERNEL_FFI_HANDLER(
    ejkernel_paged_codes, paged_codes,
    "strides", "kv_heads", "pages", "page_size", "lines", "left", "right", "scale", "cap", "value_scale", "key_bits",
    "value_bits");

}  // namespace ejkernel::paged_decode
