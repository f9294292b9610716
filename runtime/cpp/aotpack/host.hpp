// What an artifact needs of a host, and the rule that judges each need.
#pragma once

#include "cuda.hpp"
#include "index.hpp"

namespace aotpack {

// The facts of this host that targets are judged by.
struct Host {
  std::string device;                                // what the bundle was opened for: "cpu", "cuda:1"
  std::string torch;                                 // of libtorch: "2.11"
  std::string cuda;                                  // of the CUDA runtime that libtorch brings: "13.0"; "" of none
  std::optional<Gpu> gpu;
};

std::string kind_of(const std::string& device);      // "cuda" of "cuda:1"
// Why this host cannot run a variant, "" when it can. A need that is not known here is a reason.
std::string reject_variant(const VariantRecord& variant, const Host& host);

}  // namespace aotpack
