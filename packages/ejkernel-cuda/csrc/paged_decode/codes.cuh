// TurboQuant's codes as a cache format of the persistent kernel.
//
//   queries --rotation--> slots in shared memory -> segments -> rotated output --rotation back--> output
//
// A block rotates the queries of several segments together, and at its end all outputs that it has stored, so that it
// seldom reads the matrices, and a call is one launch.
#pragma once

#include "common/code_decode.cuh"
#include "paged_decode/code_rotation.cuh"

namespace ejkernel::paged_decode {

struct CodeDecodeParams : PagedDecodeParams, CodeParams, RotationParams {
  uint32_t ones;  // a pair of 1 in bfloat16: not a constant of the kernel, since LOP3 has one immediate operand
};

template <int KeyBits, int ValueBits, int Signs>
struct CallFormat<Codes<KeyBits, ValueBits, Signs>> {
  static constexpr int kHeadDim = 128;
  using Params = CodeDecodeParams;
  using S = TileShape<kHeadDim, Codes<KeyBits, ValueBits, Signs>>;

  // Fills a table. The barrier of `find_share` follows.
  template <int Bits>
  static __device__ __forceinline__ void fill(uint32_t* table, const float* codebook, int levels) {
    using Table = CodeTable<Bits>;
    const int lane = threadIdx.x % 32;
    // Codes that the codebook does not have stand for its last entry.
    const float entry = codebook[min(lane & ((1 << Bits) - 1), levels - 1)];
    for (int row = threadIdx.x / 32; row < 256; row += blockDim.x / 32) {
      const float low = __shfl_sync(~0u, entry, Table::code(row, lane, 0));
      const float high = __shfl_sync(~0u, entry, Table::code(row, lane, 1));
      table[row * 64 + lane] = Half<__nv_bfloat16>::pack(low, high);
    }
  }

  template <typename>
  static __device__ __forceinline__ void prepare(const Params& call, unsigned char* shared) {
    uint32_t* const table = reinterpret_cast<uint32_t*>(shared + S::kTable);
    fill<KeyBits>(table, call.key_codebook, call.key_levels);
    fill<ValueBits>(table + 32, call.value_codebook, call.value_levels);
    // Heads that a segment does not have are zeros: rotations store the others only.
    uint4* const queries = reinterpret_cast<uint4*>(shared + S::kQueries);
    for (int n = threadIdx.x; n < S::kQuerySlots * S::kQueryBytes / 16; n += blockDim.x) queries[n] = uint4{0, 0, 0, 0};
  }

  // Rotates the queries of the next `kQuerySlots` segments and stores them in the slots. Does so only once all slots
  // have been read: all warps have passed a barrier since. Segments are numbered in the order of items.
  template <typename Query>
  static __device__ __forceinline__ void make_query(
      const Query& query, const Params& call, const WorkShare& share, unsigned char* shared) {
    if (query.segment % S::kQuerySlots != 0) return;
    const ItemRange items = find_items(call, share, S::kKeysPerRound);
    const int first = items.first + query.segment, end = min(first + S::kQuerySlots, items.end);
    unsigned char* const slots = shared + S::kQueries;
    const auto store = [&](int item, int head, int, int column, uint32_t pair) {
      unsigned char* const slot = slots + (item - first) * S::kQueryBytes;
      if constexpr (Signs > 0) {
        if (column >= kHeadDim) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int projection = column - kHeadDim + n;
            const float scaled = __uint_as_float(pair >> n * 16 << 16) * sign_scale(projection % 16);
            const uint32_t to = projection_offset<kHeadDim, Signs>(head, projection);
            *reinterpret_cast<uint16_t*>(slot + to) = __float_as_uint(scaled) >> 16;
          }
          return;
        }
      }
      *reinterpret_cast<uint32_t*>(slot + query_offset<kHeadDim, KeyBits>(head, column)) = pair;
    };
    for (int tile = threadIdx.x / 32 * kRotationTiles; tile < (kHeadDim + Signs) / 8;
         tile += S::kWarps * kRotationTiles) {
      RotationOperands operands;
      operands.load<false>(call.query_map, kHeadDim + Signs, tile);
      operands.multiply(call, first, end, static_cast<const uint16_t*>(call.query), tile, store);
    }
    __syncthreads();
  }

  // Rotates the outputs back that the block has stored; all of their partial results are merged.
  static __device__ __forceinline__ void finish_share(const Params& call, const WorkShare& share) {
    const int tile = threadIdx.x / 32 * kRotationTiles;
    static_assert(S::kWarps * kRotationTiles * 8 >= kHeadDim, "each warp has all of its columns at once");
    RotationOperands operands;
    if (tile < kHeadDim / 8) operands.load<true>(call.rotation, kHeadDim, tile);
    const ItemRange items = find_items(call, share, S::kKeysPerRound);
    __syncthreads();
    if (tile >= kHeadDim / 8) return;
    operands.multiply(
        call, items.first, items.done, static_cast<const uint16_t*>(call.output), tile,
        [&](int, int, int row, int column, uint32_t pair) {
          if (row >= 0) *reinterpret_cast<uint32_t*>(call.final_output + size_t(row) * kHeadDim + column) = pair;
        });
  }
};

}  // namespace ejkernel::paged_decode
