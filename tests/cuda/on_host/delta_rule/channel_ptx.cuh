// Stands in for csrc/delta_rule/channel_ptx.cuh: ptx.cuh next to it has products of any width.
#pragma once

#include "delta_rule/ptx.cuh"
