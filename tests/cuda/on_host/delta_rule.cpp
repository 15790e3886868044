// Runs the kernels of csrc/delta_rule block by block.
#include "device.h"
#include "delta_rule/channel_pairs.cuh"
#include "delta_rule/channel_reverse.cuh"
#include "delta_rule/channel_scan.cuh"
#include "delta_rule/channel_segments.cuh"
#include "delta_rule/channel_token_gradients.cuh"
#include "delta_rule/chunked.cuh"
#include "delta_rule/group_gradients.cuh"
#include "delta_rule/reverse.cuh"
#include "delta_rule/segment_states.cuh"
#include "delta_rule/tensor_maps.cuh"
#include "delta_rule/token_gradients.cuh"

namespace ejkernel::delta_rule {
namespace {

// The table of a packed row's chunks, their number and that of its sequences.
const Chunk* table = nullptr;
int table_chunks = 0, table_sequences = 0;

struct Sizes {
  int batch, tokens, heads, query_heads, key_heads, value_heads, values;
  int slices;  // of a group's heads; or of token gradients, the heads whose dQ and dK are added up: 1 or 2
  int segments;
  int chunks() const { return table ? table_chunks : (tokens + kChunkTokens - 1) / kChunkTokens; }
  int sequences() const { return table ? table_sequences : batch; }
};

// Tiles of the handlers: of 64 channels, or gates of float32 numbers; stored by a warp, or by a warp of the state.
constexpr Tile kLoaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B};
constexpr Tile kStored = {64, 16, CU_TENSOR_MAP_SWIZZLE_128B, true};
constexpr Tile kStoredRows = {16, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE, true};
constexpr Tile gates_tile(int channels) { return {2 * channels, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE}; }

void describe(TensorMap* map, void* numbers, int batch, int rows, int columns, const Tile& tile) {
  encode(map, numbers, Size{columns, rows, batch}, tile);
  device::arrays.push_back({static_cast<char*>(numbers), size_t(batch) * rows * columns * 2});
}

void describe_tokens(TensorMap* map, const Sizes& n, void* numbers, int columns, const Tile& tile) {
  encode_tokens(map, numbers, Size{columns, n.tokens, n.batch}, tile);
  device::arrays.push_back({static_cast<char*>(numbers), size_t(n.batch) * n.tokens * columns * 2});
}

DeltaCall begin(const Sizes& n, void** a, float scale) {
  device::complaint = nullptr;
  device::arrays.clear();
  DeltaCall call{};
  call.tokens = n.tokens, call.heads = n.heads, call.query_heads = n.query_heads, call.key_heads = n.key_heads;
  call.value_heads = n.value_heads, call.value_dim = n.values, call.chunks = n.chunks(), call.scale = scale;
  call.table = table, call.sequences = n.sequences(), call.segments = n.segments;
  call.keys = static_cast<const __nv_bfloat16*>(a[1]);
  call.gates = static_cast<const float*>(a[3]), call.beta = static_cast<const float*>(a[4]);
  call.initial_states = static_cast<const float*>(a[5]);
  return call;
}

void describe_inputs(Maps* maps, const Sizes& n, void** a) {
  describe_tokens(&maps->query, n, a[0], n.query_heads * kKeyDim, kLoaded);
  describe_tokens(&maps->key, n, a[1], n.key_heads * kKeyDim, kLoaded);
  describe_tokens(&maps->value, n, a[2], n.value_heads * n.values, kLoaded);
}

void describe_stored(Maps* maps, const Sizes& n, void* writes, void* states) {
  describe_tokens(&maps->writes, n, writes, n.heads * n.values, kStoredRows);
  describe(&maps->states, states, n.batch * n.heads * n.chunks(), n.values, kKeyDim, kStored);
}

// Calls `use` with a constant, true or false.
template <typename Condition, typename Use>
auto with_constant(Condition condition, Use use) {
  return condition ? use(std::true_type()) : use(std::false_type());
}

template <typename L, typename Kernel>
const char* run(const Sizes& n, Kernel kernel) {
  for (int block = 0; block < n.batch * n.heads * n.segments * (n.values / kBlockValues); ++block) {
    device::run_cluster(block, 1, L::kSharedMemoryBytes, kernel, kThreads);
  }
  return device::complaint;
}

// Computes the states before segments, as the handlers do, and returns them.
template <bool Reverse>
const std::vector<float>& run_segments(const Sizes& n, DeltaCall* call, const Maps& maps, bool has_delta) {
  static std::vector<float> part_states, part_decays, states;
  if (has_delta || n.segments == 1) return states;
  const int segments = n.batch * n.heads * (n.segments - 1), state_size = kKeyDim * n.values;
  part_states.assign(size_t(segments) * kSegmentParts * state_size, NAN);
  part_decays.assign(segments * (kSegmentParts + 1), NAN), states.assign(size_t(segments) * state_size, NAN);
  SegmentCall segment_call;
  static_cast<DeltaCall&>(segment_call) = *call;
  segment_call.part_states = part_states.data(), segment_call.part_decays = part_decays.data();
  segment_call.folded = states.data();
  for (int block = 0; block < segments * kSegmentParts * (n.values / kBlockValues); ++block) {
    device::run_cluster(block, 1, SegmentLayout::kSharedMemoryBytes,
                        [&] { segment_states_kernel<Reverse>(segment_call, maps); }, kSegmentThreads);
  }
  for (int block = 0; block < n.batch * n.heads * state_size / 4 / kFoldThreads; ++block) {
    device::run_cluster(block, 1, 0, [&] { fold_segments_kernel(segment_call); }, kFoldThreads);
  }
  call->segment_states = states.data();
  return states;
}

template <bool Reverse>
const char* run_row_states(const Sizes& n, void** a, float scale) {
  DeltaCall call = begin(n, a, scale);
  Maps maps;
  describe_inputs(&maps, n, a);
  const std::vector<float>& states = run_segments<Reverse>(n, &call, maps, false);
  std::copy(states.begin(), states.end(), static_cast<float*>(a[6]));
  return device::complaint;
}

}  // namespace
}  // namespace ejkernel::delta_rule

// Sets the table of the calls after this one: null for rows.
extern "C" void set_table(const void* chunks, int count, int sequences) {
  using namespace ejkernel::delta_rule;
  table = static_cast<const Chunk*>(chunks), table_chunks = count, table_sequences = sequences;
}

// Each returns what was wrong, or null. Arrays in the order of the handlers, then the sizes.
extern "C" const char* delta_rule(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  DeltaCall call = begin(n, a, scale);
  call.final_states = static_cast<float*>(a[7]);
  const bool has_delta = call.beta;
  if (!has_delta) call.beta = static_cast<const float*>(a[10]), call.skip = static_cast<const float*>(a[11]);
  Maps maps;
  describe_inputs(&maps, n, a);
  describe_tokens(&maps.output, n, a[6], n.heads * n.values, kStoredRows);
  if (a[9]) describe_stored(&maps, n, a[8] ? a[8] : a[6], a[9]);
  run_segments<false>(n, &call, maps, has_delta);
  return with_constant(a[9], [&](auto stores) {
    return with_constant(has_delta, [&](auto delta) {
      return run<ForwardLayout<stores, delta>>(n, [&] { delta_kernel<stores, delta>(call, maps); });
    });
  });
}

extern "C" const char* delta_rule_reverse(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  DeltaCall call = begin(n, a, scale);
  call.final_states = static_cast<float*>(a[8]);
  Maps maps;
  describe_inputs(&maps, n, a);
  describe_stored(&maps, n, a[6], a[7]);
  const bool has_delta = call.beta;
  if (!has_delta) call.beta = static_cast<const float*>(a[9]), call.skip = static_cast<const float*>(a[10]);
  run_segments<true>(n, &call, maps, has_delta);
  return with_constant(has_delta, [&](auto delta) {
    return run<ReverseLayout<delta>>(n, [&] { delta_reverse_kernel<delta>(call, maps); });
  });
}

// The states after all segments but the last one, whose chunks in the table have no tokens.
extern "C" const char* row_states(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  return run_row_states<false>(*reinterpret_cast<const Sizes*>(sizes), a, scale);
}

extern "C" const char* row_states_reverse(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  return run_row_states<true>(*reinterpret_cast<const Sizes*>(sizes), a, scale);
}

extern "C" const char* channel_prepare(void** a, const int* sizes, float) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  device::complaint = nullptr;
  device::arrays.clear();
  const int keys = n.heads * kKeyDim, chunks = n.batch * n.heads * n.chunks();
  const PrepareCall call{static_cast<const float*>(a[3]), static_cast<float*>(a[9]), n.tokens, n.chunks(), n.heads,
                         n.query_heads, n.key_heads, table};
  PrepareMaps maps;
  describe_tokens(&maps.query, n, a[0], n.query_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.key, n, a[1], n.key_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.gates, n, a[2], 2 * keys, gates_tile(kKeyDim));
  describe_tokens(&maps.decayed_query, n, a[4], keys, kStored);
  describe_tokens(&maps.key_to_end, n, a[5], keys, kStored);
  describe_tokens(&maps.decayed_key, n, a[6], keys, kStored);
  describe(&maps.scores, a[7], chunks, kChunkTokens, kChunkTokens, kStored);
  describe(&maps.inverse, a[8], chunks, kChunkTokens, kChunkTokens, kStored);
  for (int block = 0; block < chunks; ++block) {
    with_constant(call.beta, [&](auto delta) {
      using L = PrepareLayout<delta>;
      device::run_cluster(block, 1, L::kBytes, [&] { channel_prepare_kernel<delta>(call, maps); }, L::kThreads);
    });
  }
  return device::complaint;
}

namespace ejkernel::delta_rule {
namespace {

// Arrays: those of `channel_prepare`'s results, values, beta and the first states.
ChannelCall begin_channels(const Sizes& n, void** a, float scale, ChannelMaps* maps) {
  device::complaint = nullptr;
  device::arrays.clear();
  const int keys = n.heads * kKeyDim, chunks = n.batch * n.heads * n.chunks();
  ChannelCall call{};
  call.tokens = n.tokens, call.heads = call.query_heads = call.key_heads = n.heads, call.value_heads = n.value_heads;
  call.value_dim = n.values, call.chunks = n.chunks(), call.segments = n.segments;
  call.table = table, call.sequences = n.sequences();
  call.scale = scale, call.decay = static_cast<const float*>(a[5]), call.beta = static_cast<const float*>(a[7]);
  call.initial_states = static_cast<const float*>(a[8]);
  describe_tokens(&maps->query, n, a[0], keys, kLoaded);
  describe_tokens(&maps->key, n, a[1], keys, kLoaded);
  describe_tokens(&maps->decayed_key, n, a[2], keys, kLoaded);
  describe(&maps->scores, a[3], chunks, kChunkTokens, kChunkTokens, kLoaded);
  describe(&maps->inverse, a[4], chunks, kChunkTokens, kChunkTokens, kLoaded);
  describe_tokens(&maps->value, n, a[6], n.value_heads * n.values, kLoaded);
  device::arrays.push_back({static_cast<const char*>(a[5]), size_t(chunks) * kKeyDim * 4});
  return call;
}

// Finds where the scans of segments begin, as the handlers do.
template <bool Reverse>
void run_transitions(const Sizes& n, ChannelCall* call, const ChannelMaps& maps) {
  static std::vector<int> found;
  const int blocks = call->beta ? n.batch * n.heads * (n.segments - 1) * 2 : 0;
  found.assign(blocks, -1);
  TransitionCall transition_call;
  static_cast<ChannelCall&>(transition_call) = *call;
  transition_call.found = found.data(), call->early_steps = found.data();
  for (int block = 0; block < blocks; ++block) {
    device::run_cluster(block, 1, TransitionLayout::kSharedMemoryBytes,
                        [&] { channel_transitions_kernel<Reverse>(transition_call, maps); }, kChannelThreads);
  }
}

template <typename L, typename Kernel>
const char* run_channels(const Sizes& n, Kernel kernel) {
  for (int block = 0; block < n.batch * n.heads * n.segments * (n.values / kBlockValues); ++block) {
    device::run_cluster(block, 1, L::kSharedMemoryBytes, kernel, kChannelThreads);
  }
  return device::complaint;
}

}  // namespace
}  // namespace ejkernel::delta_rule

extern "C" const char* channel_scan(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  ChannelMaps maps;
  ChannelCall call = begin_channels(n, a, scale, &maps);
  call.final_states = static_cast<float*>(a[10]);
  describe_tokens(&maps.output, n, a[9], n.heads * n.values, kStoredRows);
  if (a[12]) describe_stored(&maps, n, a[11] ? a[11] : a[9], a[12]);
  run_transitions<false>(n, &call, maps);
  return with_constant(a[12], [&](auto stores) {
    return with_constant(call.beta, [&](auto delta) {
      return run_channels<ChannelLayout<stores, delta>>(n, [&] { channel_kernel<stores, delta>(call, maps); });
    });
  });
}

extern "C" const char* channel_scan_reverse(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  ChannelMaps maps;
  ChannelCall call = begin_channels(n, a, scale, &maps);
  call.final_states = static_cast<float*>(a[11]);
  describe_stored(&maps, n, a[9], a[10]);
  run_transitions<true>(n, &call, maps);
  return with_constant(call.beta, [&](auto delta) {
    return run_channels<ChannelLayout<true, delta>>(n, [&] { channel_reverse_kernel<delta>(call, maps); });
  });
}

extern "C" const char* delta_rule_token_gradients(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  device::complaint = nullptr;
  device::arrays.clear();
  TokenGradientCall call{};
  TokenGradientMaps maps;
  const int stored_heads = n.heads / n.slices, keys = stored_heads * kKeyDim;
  const int values = n.heads * n.values, states = n.batch * n.heads * n.chunks();
  call.table = table, call.tokens = n.tokens, call.chunks = n.chunks(), call.heads = n.heads, call.scale = scale;
  call.query_heads = n.query_heads, call.key_heads = n.key_heads, call.value_heads = n.value_heads;
  call.value = static_cast<const __nv_bfloat16*>(a[2]);
  call.gates = static_cast<const float*>(a[8]), call.beta = static_cast<const float*>(a[9]);
  call.dvalue = static_cast<__nv_bfloat16*>(a[12]);
  call.dgates = static_cast<float*>(a[13]), call.dbeta = static_cast<float*>(a[14]);
  describe_tokens(&maps.query, n, a[0], n.query_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.key, n, a[1], n.key_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.writes, n, a[3], call.beta ? values : n.value_heads * n.values, kLoaded);
  describe_tokens(&maps.cotangent, n, a[4], values, kLoaded);
  describe_tokens(&maps.dwrites, n, a[5], values, kLoaded);
  describe(&maps.states, a[6], states, n.values, kKeyDim, kLoaded);
  describe(&maps.dstates, a[7], states, n.values, kKeyDim, kLoaded);
  if (n.query_heads < stored_heads) call.dquery = static_cast<float*>(a[10]);
  if (n.key_heads < stored_heads) call.dkey = static_cast<float*>(a[11]);
  describe_tokens(&maps.dquery, n, a[10], keys, kStored);
  describe_tokens(&maps.dkey, n, a[11], keys, kStored);
  for (int block = 0; block < states; block += n.slices) {
    with_constant(n.values == 128, [&](auto wide) {
      constexpr int V = wide ? 128 : 64, kBytes = GradientLayout<V>::kBytes;
      if (n.slices == 2) {
        device::run_cluster(block, 2, kBytes, [&] { delta_pair_gradients_kernel<V>(call, maps); }, kGradientThreads);
        return;
      }
      with_constant(call.beta, [&](auto delta) {
        device::run_cluster(block, 1, kBytes, [&] { delta_token_gradients_kernel<V, delta>(call, maps); },
                            kGradientThreads);
      });
    });
  }
  return device::complaint;
}

extern "C" const char* delta_rule_group_gradients(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  device::complaint = nullptr;
  device::arrays.clear();
  GroupGradientCall call{};
  GroupGradientMaps maps;
  const int states = n.batch * n.heads * n.chunks();
  call.table = table, call.tokens = n.tokens, call.chunks = n.chunks(), call.heads = n.heads, call.scale = scale;
  call.groups = n.query_heads, call.slices = n.slices, call.value_heads = n.value_heads;
  call.gates = static_cast<const float*>(a[6]), call.factors = static_cast<const float*>(a[7]);
  call.dgates = static_cast<float*>(a[10]), call.dfactors = static_cast<float*>(a[11]);
  call.dskip = static_cast<float*>(a[12]);
  describe_tokens(&maps.query, n, a[0], n.query_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.key, n, a[1], n.key_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.value, n, a[2], n.value_heads * n.values, kLoaded);
  describe_tokens(&maps.cotangent, n, a[3], n.heads * n.values, kLoaded);
  describe(&maps.states, a[4], states, n.values, kKeyDim, kLoaded);
  describe(&maps.dstates, a[5], states, n.values, kKeyDim, kLoaded);
  if (call.slices > 1) {
    call.dquery = static_cast<float*>(a[8]), call.dkey = static_cast<float*>(a[9]);
  } else {
    describe_tokens(&maps.dquery, n, a[8], n.query_heads * kKeyDim, kStored);
    describe_tokens(&maps.dkey, n, a[9], n.query_heads * kKeyDim, kStored);
  }
  for (int block = 0; block < n.batch * n.chunks() * call.groups * call.slices; ++block) {
    with_constant(n.values == 128, [&](auto wide) {
      constexpr int V = wide ? 128 : 64;
      device::run_cluster(block, 1, GroupLayout<V>::kBytes, [&] { delta_group_gradients_kernel<V>(call, maps); },
                          kGroupThreads);
    });
  }
  return device::complaint;
}

extern "C" const char* channel_token_gradients(void** a, const int* sizes, float scale) {
  using namespace ejkernel::delta_rule;
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  device::complaint = nullptr;
  device::arrays.clear();
  ChannelGradientCall call{};
  ChannelGradientMaps maps;
  const int keys = n.heads * kKeyDim, values = n.heads * n.values, states = n.batch * n.heads * n.chunks();
  call.batch = n.batch, call.table = table, call.tokens = n.tokens, call.chunks = n.chunks(), call.heads = n.heads, call.scale = scale;
  call.query_heads = n.query_heads, call.key_heads = n.key_heads, call.value_heads = n.value_heads;
  call.value = static_cast<const __nv_bfloat16*>(a[2]);
  call.gates = static_cast<const float*>(a[8]), call.beta = static_cast<const float*>(a[9]);
  call.dvalue = static_cast<__nv_bfloat16*>(a[12]);
  call.dgates = static_cast<float*>(a[13]), call.dbeta = static_cast<float*>(a[14]);
  describe_tokens(&maps.query, n, a[0], n.query_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.key, n, a[1], n.key_heads * kKeyDim, kLoaded);
  describe_tokens(&maps.gates, n, a[8], 2 * keys, gates_tile(kBlockChannels));
  describe_tokens(&maps.writes, n, a[3], call.beta ? values : n.value_heads * n.values, kLoaded);
  describe_tokens(&maps.cotangent, n, a[4], values, kLoaded);
  describe_tokens(&maps.dwrites, n, a[5], values, kLoaded);
  describe(&maps.states, a[6], states, n.values, kKeyDim, kLoaded);
  describe(&maps.dstates, a[7], states, n.values, kKeyDim, kLoaded);
  if (n.query_heads < n.heads) call.dquery = static_cast<float*>(a[10]);
  if (n.key_heads < n.heads) call.dkey = static_cast<float*>(a[11]);
  describe_tokens(&maps.dquery, n, a[10], keys, kStored);
  describe_tokens(&maps.dkey, n, a[11], keys, kStored);
  for (int block = 0; block < 2 * states; ++block) {
    with_constant(n.values == 128, [&](auto wide) {
      with_constant(call.beta, [&](auto delta) {
        constexpr int V = wide ? 128 : 64;
        device::run_cluster(block, 1, ChannelGradientLayout<V, delta>::kBytes,
                            [&] { channel_token_gradients_kernel<V, delta>(call, maps); }, kGradientThreads);
      });
    });
  }
  return device::complaint;
}
