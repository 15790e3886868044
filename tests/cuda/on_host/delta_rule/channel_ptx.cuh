// Stands in for csrc/delta_rule/channel_ptx.cuh: ptx.cuh beside this has products of any width.
#pragma once

#include "delta_rule/ptx.cuh"
