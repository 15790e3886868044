// The gradients of tokens where the heads of a group share queries and keys, without the delta rule, as those of
// Mamba-2: one block computes a chunk for all heads of a group, one after the other, so the gradients of queries and
// keys are sums in registers. With S the state before the chunk, dS the gradient of the one after it, D_ij =
// exp2(G_i - G_j), E = exp2(G), F = exp2(G_last - G), f the factors on what tokens write, and P = scale D (dO X^T) on
// and below the diagonal, sums over heads being over all terms with values or gates:
//   dQ = sum scale E dO S^T + (sum P f) K          dK = sum f F X dS^T + (sum f P^T) Q
//   df = <F X dS^T + P^T Q, K> of each head        dG = <dQ, Q> - f df of each head
// and of the last token also <S after the chunk, dS>. Products with K and Q need the sums over heads alone. What a head
// needs of them are its sums over rows and columns of P times <q_i, k_j>, which is the same for all heads.
//
//   loads    a warp each: tiles by TMA, cumulative gates, and the gradients of gates and factors of a head
//   queries  one warpgroup, which has dQ as accumulators
//   keys     one warpgroup, which has dK, and computes P^T, so that both sum up rows; each multiplies half of S with dS
#pragma once

#include "delta_rule/token_gradients.cuh"

namespace ejkernel::delta_rule {

constexpr int kGroupThreads = 384, kGroupStoreBarrier = 1;

struct GroupGradientCall {
  const float *gates, *factors;  // [B, T, H]; null without
  float *dquery, *dkey;  // [B, T, groups * slices, K] if a group has several slices; else null: tensor maps are used
  float *dgates, *dfactors;  // [B, T, H]
  float* dskip;  // [B, chunks, H], <dO, X>; null without a skip
  const Chunk* table;  // as in DeltaCall
  int tokens, chunks, heads, groups, slices, value_heads;
  float scale;
};

struct GroupGradientMaps {
  TensorMap query, key, value, cotangent;  // [B, T, heads, channels]
  TensorMap states, dstates;  // [B, H, chunks, V, K]
  TensorMap dquery, dkey;
};

// Shared memory, in bytes. A stage has the tiles of a head and its numbers, float32: by token G, f, <dQ, Q> and df, and
// sums of each warp over tokens.
template <int V>
struct GroupLayout {
  static constexpr int kStages = V == 64 ? 3 : 2;
  static constexpr int kValueBytes = V / 64 * kTileBytes, kStateBytes = V * kKeyDim * 2;
  static constexpr int kQuery = 0, kKey = 2 * kTileBytes, kTiles = 4 * kTileBytes;
  static constexpr int kCotangent = 0, kValue = kValueBytes, kStates = 2 * kValueBytes,
                       kDstates = kStates + kStateBytes, kStageBytes = kDstates + kStateBytes;
  static constexpr int kNumbers = kTiles + kStages * kStageBytes, kNumberBytes = 4 * 256 + 48;
  static constexpr int kSums = 0, kFactors = 64, kQueryRows = 128, kKeyRows = 192, kWarpSums = 256;
  static constexpr int kBarriers = kNumbers + kStages * kNumberBytes, kBytes = kBarriers + 8 * (1 + 3 * kStages);
  static_assert(kBytes <= 227 * 1024, "more shared memory than a block can have");
};

template <int V>
struct GroupBlock {
  using L = GroupLayout<V>;
  const GroupGradientCall& call;
  const GroupGradientMaps& maps;
  char* const memory;
  const uint32_t shared;
  const int warp, lane, slice, group, chunk, row, slice_heads, first_head;
  const Chunk span;  // the chunk's tokens

  __device__ __forceinline__ GroupBlock(const GroupGradientCall& c, const GroupGradientMaps& m, char* shared_memory)
      : call(c),
        maps(m),
        memory(shared_memory),
        shared(shared_address(shared_memory)),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        slice(blockIdx.x % c.slices),
        group(blockIdx.x / c.slices % c.groups),
        chunk(blockIdx.x / c.slices / c.groups % c.chunks),
        row(blockIdx.x / c.slices / c.groups / c.chunks),
        slice_heads(c.heads / c.groups / c.slices),
        first_head((group * c.slices + slice) * slice_heads),
        span(chunk_at(c.table, c.tokens, row, chunk)) {}

  __device__ __forceinline__ uint32_t stage(int s) const { return shared + L::kTiles + s * L::kStageBytes; }
  __device__ __forceinline__ float* numbers(int s) const {
    return reinterpret_cast<float*>(memory + L::kNumbers + s * L::kNumberBytes);
  }
  __device__ __forceinline__ uint32_t tokens_barrier() const { return shared + L::kBarriers; }
  __device__ __forceinline__ uint32_t full_barrier(int s) const { return shared + L::kBarriers + 8 + 24 * s; }
  __device__ __forceinline__ uint32_t free_barrier(int s) const { return full_barrier(s) + 8; }
  __device__ __forceinline__ uint32_t summed_barrier(int s) const { return full_barrier(s) + 16; }
  __device__ __forceinline__ int64_t token_index(int chunk_row, int head) const {
    return (int64_t(row) * call.tokens + span.token + chunk_row) * call.heads + first_head + head;
  }
  __device__ __forceinline__ bool is_token(int chunk_row) const { return chunk_row < span.tokens; }
  __device__ __forceinline__ bool is_stored(int chunk_row) const { return chunk_row < span.rows; }

  __device__ __forceinline__ void start_barriers() const {
    start_barrier(tokens_barrier(), 1);
    for (int i = 0; i < L::kStages; ++i) {
      start_barrier(full_barrier(i), 2), start_barrier(free_barrier(i), 9), start_barrier(summed_barrier(i), 8);
    }
    publish_barriers();
  }

  // ---- loads ----

  // One thread.
  __device__ __forceinline__ void load_tiles() const {
    arrive_and_expect(tokens_barrier(), 4 * kTileBytes);
    for (int i = 0; i < 2; ++i) {
      const int column = group * kKeyDim + i * 64;
      copy_rows(shared + L::kQuery + i * kTileBytes, &maps.query, column, span, row, tokens_barrier());
      copy_rows(shared + L::kKey + i * kTileBytes, &maps.key, column, span, row, tokens_barrier());
    }
    Ring<L::kStages> ring;
    for (int i = 0; i < slice_heads; ++i) {
      const int head = first_head + i, value_head = head / (call.heads / call.value_heads);
      const uint32_t to = stage(ring.index), barrier = full_barrier(ring.index);
      if (i >= L::kStages) wait_for_phase(free_barrier(ring.index), ring.phase ^ 1);
      arrive_and_expect(barrier, L::kStageBytes);
      for (int j = 0; j < V / 64; ++j) {
        copy_rows(to + L::kCotangent + j * kTileBytes, &maps.cotangent, head * V + j * 64, span, row, barrier);
        copy_rows(to + L::kValue + j * kTileBytes, &maps.value, value_head * V + j * 64, span, row, barrier);
      }
      const int index = (row * call.heads + head) * call.chunks + chunk;
      for (int j = 0; j < V / 64 * 2; ++j) {
        copy_tile(to + L::kStates + j * kTileBytes, &maps.states, j % 2 * 64, j / 2 * 64, index, barrier);
        copy_tile(to + L::kDstates + j * kTileBytes, &maps.dstates, j % 2 * 64, j / 2 * 64, index, barrier);
      }
      ring.next();
    }
  }

  // One warp; a lane has two tokens.
  __device__ __forceinline__ void load_gates() const {
    float gates[2], factors[2];
    const auto fetch = [&](int head) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * lane + i;
        const bool valid = is_token(at);
        gates[i] = valid && call.gates != nullptr ? __ldg(call.gates + token_index(at, head)) : 0.0f;
        factors[i] = valid && call.factors != nullptr ? __ldg(call.factors + token_index(at, head)) : 1.0f;
      }
    };
    fetch(0);
    Ring<L::kStages> ring;
    for (int head = 0; head < slice_heads; ++head) {
      const float first = clamped_log2_gate(gates[0]), both = first + clamped_log2_gate(gates[1]);
      const float2 own_factors = {factors[0], factors[1]};
      if (head + 1 < slice_heads) fetch(head + 1);
      float sum = both;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float earlier_sum = __shfl_up_sync(~0u, sum, lanes);
        if (lane >= lanes) sum += earlier_sum;
      }
      if (head >= L::kStages) wait_for_phase(free_barrier(ring.index), ring.phase ^ 1);
      reinterpret_cast<float2*>(numbers(ring.index) + L::kSums)[lane] = {sum - both + first, sum};
      reinterpret_cast<float2*>(numbers(ring.index) + L::kFactors)[lane] = own_factors;
      __syncwarp();
      if (lane == 0) arrive(full_barrier(ring.index));
      ring.next();
    }
  }

  // One warp stores the gradients of the gates, factors and skips of each head, from the sums of the other warps.
  __device__ __forceinline__ void store_sums() const {
    Ring<L::kStages> ring;
    int64_t at = token_index(2 * lane, 0);
    const int num_rows = span.rows - 2 * lane, num_tokens = span.tokens - 2 * lane;
    for (int head = 0; head < slice_heads; ++head, ++at) {
      bool has_gradient[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        has_gradient[i] = call.gates != nullptr && i < num_tokens &&
                          !(clamped_log2_gate(__ldg(call.gates + at + i * call.heads)) < kMinLog2GateWithGradient);
      }
      wait_for_phase(summed_barrier(ring.index), ring.phase);
      const float* const own = numbers(ring.index);
      const float2 queries = reinterpret_cast<const float2*>(own + L::kQueryRows)[lane];
      const float2 keys = reinterpret_cast<const float2*>(own + L::kKeyRows)[lane];
      const float2 factors = reinterpret_cast<const float2*>(own + L::kFactors)[lane];
      const float4 ends = reinterpret_cast<const float4*>(own + L::kWarpSums)[0];
      const float4 skips = reinterpret_cast<const float4*>(own + L::kWarpSums)[1];
      const float4 states = reinterpret_cast<const float4*>(own + L::kWarpSums)[2];
      __syncwarp();
      if (lane == 0) arrive(free_barrier(ring.index));
      const float own_first = queries.x - factors.x * keys.x, own_second = queries.y - factors.y * keys.y;
      const float both = own_first + own_second;
      float sum = both;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float earlier_sum = __shfl_up_sync(~0u, sum, lanes);
        if (lane >= lanes) sum += earlier_sum;
      }
      const float total = __shfl_sync(~0u, sum, 31) + (ends.x + ends.y + (ends.z + ends.w)) +
                          (states.x + states.y + (states.z + states.w));
      const float dgates[2] = {total - (sum - both), total - (sum - own_second)}, dfactors[2] = {keys.x, keys.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= num_rows) continue;
        if (call.gates != nullptr) call.dgates[at + i * call.heads] = has_gradient[i] ? dgates[i] : 0.0f;
        if (call.factors != nullptr) call.dfactors[at + i * call.heads] = dfactors[i];
      }
      if (lane == 0 && call.dskip != nullptr) {
        call.dskip[(int64_t(row) * call.chunks + chunk) * call.heads + first_head + head] =
            skips.x + skips.y + (skips.z + skips.w);
      }
      ring.next();
    }
  }
};

// The warpgroup of queries, or that of keys, which is the same with the roles of X and dO, S and dS, rows and columns
// exchanged.
template <int V, bool OfKeys>
struct GroupGradients {
  using L = GroupLayout<V>;
  using Tokens = TokenGradients<V, false>;
  const GroupBlock<V>& block;
  const GroupGradientCall& call;
  const int warp, lane, t, g;
  float gradient[16][4];  // the sum over heads of what passes through states
  float pair_sums[8][4];  // the sum over heads of P f, or of its transpose
  float scores[8][4];  // <q, k> of rows and columns

  __device__ __forceinline__ explicit GroupGradients(const GroupBlock<V>& b)
      : block(b), call(b.call), warp(b.warp), lane(b.lane), t(b.lane % 4), g(b.lane / 4) {}

  __device__ __forceinline__ uint64_t operand(uint32_t address) const { return swizzled_operand(address); }

  __device__ __forceinline__ void run() {
    constexpr int kOwn = OfKeys ? L::kKey : L::kQuery, kOther = OfKeys ? L::kQuery : L::kKey;
#pragma unroll
    for (int i = 0; i < 64; ++i) gradient[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) pair_sums[i / 4][i % 4] = 0.0f;
    wait_for_phase(block.tokens_barrier(), 0);
    const uint64_t own = operand(block.shared + kOwn), other = operand(block.shared + kOther);
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) multiply_shared(scores, own + Tokens::column_step(i), other + Tokens::column_step(i), i);
    commit_products();
    wait_for_products<0>(scores);
    Ring<L::kStages> ring;
    for (int head = 0; head < block.slice_heads; ++head) {
      wait_for_phase(block.full_barrier(ring.index), ring.phase);
      add_head(ring.index, own);
      ring.next();
    }
    store(swizzled_operand(block.shared + kOther, kTileBytes));
  }

  __device__ __forceinline__ void add_head(int s, uint64_t tokens) {
    float* const numbers = block.numbers(s);
    const uint32_t tiles = block.stage(s);
    const uint32_t values = tiles + (OfKeys ? L::kValue : L::kCotangent);
    const uint64_t rows = operand(values), columns = operand(tiles + (OfKeys ? L::kCotangent : L::kValue));
    const uint32_t states = tiles + (OfKeys ? L::kDstates : L::kStates);
    const uint64_t state_rows = swizzled_operand(states, kTileBytes);
    float row_sums[2] = {}, pair_row_sums[2] = {}, diagonal = 0.0f;
    const float state_product = multiply_states(s, numbers);
    float pairs[8][4];
#pragma unroll
    for (int half = 0; half < V / 64; ++half) {
      uint32_t left[4][4];
      load_decayed(left, values + half * kTileBytes, numbers);
      float products[8][4];
      fence_products();
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < V / 16; ++i) {
          multiply_shared(pairs, rows + Tokens::column_step(i), columns + Tokens::column_step(i), i);
        }
        commit_products();
      }
      const uint64_t state = operand(states + half * 2 * kTileBytes);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        multiply_shared(products, tokens + Tokens::column_step(i), state + Tokens::column_step(i), i);
      }
      commit_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_rows(gradient, left[i], state_rows + Tokens::row_step(half * 4 + i));
      commit_products();
      if (half == 0) {
        wait_for_products<2>(pairs);
        add_pairs(pair_row_sums, diagonal, pairs, numbers);
      }
      wait_for_products<1>(products);
      multiply_and_sum(row_sums, products, values + half * kTileBytes);
      wait_for_products<0, 16>(gradient);
    }
    store_row_sums(numbers, row_sums, pair_row_sums, state_product, diagonal);
    __syncwarp();
    if (lane == 0) arrive(block.free_barrier(s)), arrive(block.summed_barrier(s));
  }

  // The thread's part of E of the last token times <S, dS>: of half of the elements, each warpgroup has one.
  __device__ __forceinline__ float multiply_states(int s, const float* numbers) const {
    if (call.gates == nullptr) return 0.0f;
    const char* const tiles = block.memory + L::kTiles + s * L::kStageBytes + (OfKeys ? L::kStateBytes / 2 : 0);
    const int first = warp * 32 + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < L::kStateBytes / 32 / 128; ++i) {
      sum += Tokens::product(reinterpret_cast<const uint4*>(tiles + L::kStates)[first + i * 128],
                             reinterpret_cast<const uint4*>(tiles + L::kDstates)[first + i * 128]);
    }
    return sum * exp2_fast(numbers[L::kSums + 63]);
  }

  // A number of the thread's rows g and g + 8, which is loaded where it is used: registers are full.
  __device__ __forceinline__ float row_number(const float* numbers, int kind, int i) const {
    return numbers[kind + warp * 16 + g + i * 8];
  }

  // scale E of the output's gradient, or F of values.
  __device__ __forceinline__ float row_decay(const float* numbers, int i) const {
    const float sum = row_number(numbers, L::kSums, i);
    return OfKeys ? exp2_fast(numbers[L::kSums + 63] - sum) : call.scale * exp2_fast(sum);
  }

  // The warp's rows of dO with scale E, or of X with f F, as left operands.
  __device__ __forceinline__ void load_decayed(uint32_t (&left)[4][4], uint32_t tile, const float* numbers) const {
    float row_factors[2] = {row_decay(numbers, 0), row_decay(numbers, 1)};
    if constexpr (OfKeys) {
      row_factors[0] *= row_number(numbers, L::kFactors, 0), row_factors[1] *= row_number(numbers, L::kFactors, 1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(left[i], tile + block_row(warp * 16, i * 2, lane));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = left[i][j];
        left[i][j] = pack(row_factors[j % 2] * __uint_as_float(pair << 16),
                          row_factors[j % 2] * __uint_as_float(pair & 0xFFFF0000u));
      }
    }
  }

  // Sums up products of the warp's rows of dO with those of Q S, or of X with those of K dS.
  __device__ __forceinline__ void multiply_and_sum(float (&sums)[2], const float (&products)[8][4], uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t values[4];
      load_matrices(values, tile + block_row(warp * 16, i * 2, lane));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const d = products[2 * i + j / 2] + j % 2 * 2;
        sums[j % 2] += d[0] * __uint_as_float(values[j] << 16) + d[1] * __uint_as_float(values[j] & 0xFFFF0000u);
      }
    }
  }

  // Applies the decay to pairs, adds them to the sums over heads, and their products with the scores to those of rows.
  __device__ __forceinline__ void add_pairs(float (&row_sums)[2], float& diagonal, const float (&pairs)[8][4],
                                            const float* numbers) {
    float sums[2], factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = row_number(numbers, L::kSums, i), factors[i] = row_number(numbers, L::kFactors, i);
    }
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      if (OfKeys ? tile < 2 * warp : tile > 2 * warp + 1) continue;
      const float2 column_sums = *reinterpret_cast<const float2*>(numbers + L::kSums + tile * 8 + t * 2);
      const float2 column_factors = *reinterpret_cast<const float2*>(numbers + L::kFactors + tile * 8 + t * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = warp * 16 + g + i / 2 * 8, column = tile * 8 + t * 2 + i % 2;
        const float difference = sums[i / 2] - (i % 2 ? column_sums.y : column_sums.x);
        float pair = pairs[tile][i] * exp2_fast(OfKeys ? -difference : difference);
        if (OfKeys ? column < at : column > at) pair = 0.0f;
        if (!OfKeys && column == at) diagonal += pairs[tile][i];
        if constexpr (!OfKeys) pair *= i % 2 ? column_factors.y : column_factors.x;
        row_sums[i / 2] += pair * scores[tile][i];
        pair_sums[tile][i] += OfKeys ? pair * factors[i / 2] : pair;
      }
    }
  }

  // <dQ, Q>, or the gradient of factors, of the head and the warp's rows; and sums over the warp's tokens.
  __device__ __forceinline__ void store_row_sums(float* numbers, const float (&row_sums)[2],
                                                 const float (&pair_row_sums)[2], float state_product,
                                                 float diagonal) const {
    const float through_states[2] = {row_decay(numbers, 0) * row_sums[0], row_decay(numbers, 1) * row_sums[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = through_states[i] + call.scale * pair_row_sums[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (t == 0) numbers[(OfKeys ? L::kKeyRows : L::kQueryRows) + warp * 16 + g + i * 8] = sum;
    }
    if (call.gates != nullptr) {
      float sum = state_product;
      if constexpr (OfKeys) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum += row_number(numbers, L::kFactors, i) * through_states[i];
      }
      store_warp_sum(numbers + L::kWarpSums + (OfKeys ? 0 : 8), sum);
    }
    if (!OfKeys && call.dskip != nullptr) store_warp_sum(numbers + L::kWarpSums + 4, diagonal);
  }

  __device__ __forceinline__ void store_warp_sum(float* to, float sum) const {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) to[warp] = sum;
  }

  // Multiplies the sum of the pairs over all heads by the keys (for dQ) or the queries (for dK), adds the product to
  // the gradient, and stores it.
  __device__ __forceinline__ void store(uint64_t other_rows) {
#pragma unroll
    for (int i = 0; i < 32; ++i) pair_sums[i / 4][i % 4] *= call.scale;
    uint32_t left[4][4];
    Tokens::pack_pairs(left, pair_sums);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(gradient, left[i], other_rows + Tokens::row_step(i));
    commit_products();
    wait_for_products<0, 16>(gradient);
    const int column = block.group * call.slices + block.slice;
    if (float* const array = OfKeys ? call.dkey : call.dquery) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = warp * 16 + g + i * 8;
        if (!block.is_stored(at)) continue;
        const int64_t token = int64_t(block.row) * call.tokens + block.span.token + at;
        float2* const to =
            reinterpret_cast<float2*>(array + (token * call.groups * call.slices + column) * kKeyDim) + t;
#pragma unroll
        for (int tile = 0; tile < 16; ++tile) to[tile * 4] = {gradient[tile][2 * i], gradient[tile][2 * i + 1]};
      }
      return;
    }
    synchronise<256>(kGroupStoreBarrier);  // nothing is read of the stages any more
    const uint32_t tiles = block.stage(0) + (OfKeys ? L::kStates : L::kCotangent);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_matrices(tiles + i / 4 * kTileBytes + block_row(warp * 16, i % 4 * 2, lane),
                     pack(gradient[2 * i][0], gradient[2 * i][1]), pack(gradient[2 * i][2], gradient[2 * i][3]),
                     pack(gradient[2 * i + 1][0], gradient[2 * i + 1][1]),
                     pack(gradient[2 * i + 1][2], gradient[2 * i + 1][3]));
    }
    fence_shared_stores();
    __syncwarp();
    if (lane != 0) return;
    for (int i = 0; i < 2; ++i) {
      store_chunk_rows(OfKeys ? &block.maps.dkey : &block.maps.dquery, column * kKeyDim + i * 64, block.span,
                       warp * 16, block.row, tiles + i * kTileBytes + warp * 16 * 128);
    }
    wait_for_stores();
  }
};

template <int V>
__global__ void __launch_bounds__(kGroupThreads, 1)
    delta_group_gradients_kernel(const GroupGradientCall call, const __grid_constant__ GroupGradientMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  const GroupBlock<V> block(call, maps, memory);
  if (block.span.rows == 0) {  // the table of a packed row has more entries than chunks
    const int head = int(threadIdx.x);
    if (call.dskip != nullptr && head < block.slice_heads) {
      call.dskip[(int64_t(block.row) * call.chunks + block.chunk) * call.heads + block.first_head + head] = 0.0f;
    }
    return;
  }
  if (threadIdx.x == 0) block.start_barriers();
  __syncthreads();
  const int role = threadIdx.x / 128;
  if (role == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) block.load_tiles();
    if (block.warp == 1) block.load_gates();
    if (block.warp == 2) block.store_sums();
  } else if (role == 1) {
    take_registers<232>();
    GroupGradients<V, false> queries(block);
    queries.run();
  } else {
    take_registers<232>();
    GroupGradients<V, true> keys(block);
    keys.run();
  }
#endif
}

}  // namespace ejkernel::delta_rule
