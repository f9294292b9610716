// A tiny call of each library of NVIDIA's that packages call: what they set up at their first (cuBLAS a handle and kernels,
// 70 ms of BERT's first call on an H200, torch 2.11) is there then.
#pragma once

#include "libtorch.hpp"
#include "member.hpp"

namespace aotpack {

// Call what the `packages` say that they call, once a process. For a thread that ends then: handles go back to libtorch's
// pool with it, and to the next one that asks. Error when a call fails.
void make_first_calls(const Libtorch& library, const std::string& device, const std::vector<const Member*>& packages);

}  // namespace aotpack
