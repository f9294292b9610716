#include "host.hpp"

#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace aotpack {
namespace {

// Flags each level adds, as /proc/cpuinfo spells them.
const std::vector<std::pair<std::string, std::string>> LEVELS = {
    {"x86-64", ""},
    {"x86-64-v2", "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"},
    {"x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"},
    {"x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"}};

using Capability = std::pair<int, int>;

// Of an `f` target those it runs on (CUDA C++ Programming Guide, family-specific features); of others, itself alone.
const std::map<Capability, std::set<Capability>> FAMILIES = {
    {{10, 0}, {{10, 0}, {10, 3}}}, {{10, 3}, {{10, 3}}}, {{12, 0}, {{12, 0}, {12, 1}}}, {{12, 1}, {{12, 1}}}};

// Machine code of these and of others is for one capability alone.
const std::set<Capability> TEGRA = {{5, 3}, {6, 2}, {7, 2}, {8, 7}, {10, 1}, {11, 0}};

// Shared memory that one block may have, static and dynamic.
const std::map<Capability, int> SHARED_BYTES = {
    {{7, 0}, 98304}, {{7, 2}, 98304}, {{7, 5}, 65536}, {{8, 0}, 166912}, {{8, 6}, 101376}, {{8, 7}, 166912}, {{8, 9}, 101376},
    {{9, 0}, 232448}, {{10, 0}, 232448}, {{10, 3}, 232448}, {{11, 0}, 232448}, {{12, 0}, 101376}, {{12, 1}, 101376}};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> found;
  std::stringstream stream(text);
  for (std::string word; stream >> word;) found.push_back(word);
  return found;
}

// Leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0).
std::vector<Int> version(const std::string& text) {
  std::vector<Int> found;
  for (std::size_t at = 0; at < text.size() && text[at] >= '0' && text[at] <= '9';) {
    const std::size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
    found.push_back(saturated(text.substr(at, end - at)));
    if (end >= text.size() || text[end] != '.') break;
    at = end + 1;
  }
  return found;
}

std::vector<Int> most(std::vector<Int> numbers, std::size_t count) {
  numbers.resize(std::min(numbers.size(), count));
  return numbers;
}

std::string reject_cpu(const std::string& wanted) {
  std::set<std::string> there, needed;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; there.empty() && std::getline(file, line);)
    if (line.rfind("flags", 0) == 0 && line.find(':') != std::string::npos)
      for (const std::string& flag : split(line.substr(line.find(':') + 1))) there.insert(flag);
  for (std::string word : split(wanted)) {
    const bool is_level = std::any_of(LEVELS.begin(), LEVELS.end(), [&](const auto& level) { return level.first == word; });
    for (char& c : word) c = is_level || c < 'A' || c > 'Z' ? c : char(c - 'A' + 'a');
    if (!is_level) needed.insert(word);
    else
      for (const auto& [level, names] : LEVELS) {
        for (const std::string& flag : split(names)) needed.insert(flag);
        if (level == word) break;
      }
  }
  std::string missing;
  for (const std::string& flag : needed)
    if (!there.count(flag)) missing += " " + flag;
  return missing.empty() ? "" : "built for CPU " + wanted + ", this host lacks" + missing;
}

// `value` is "sm_90a", as the index was checked to have it.
std::string reject_cubin(const std::string& value, const Gpu& gpu) {
  std::string digits = value.substr(value.find('_') + 1);
  const char suffix = digits.back() == 'a' || digits.back() == 'f' ? digits.back() : ' ';
  if (suffix != ' ') digits.pop_back();
  const int major = int(saturated(digits.substr(0, digits.size() - 1)) % 100000), minor = digits.back() - '0';
  const Capability wanted{major, minor}, here{gpu.major, gpu.minor};
  if (suffix == 'a') return here == wanted ? "" : value + " runs on that capability alone, this is " + gpu.text();
  if (suffix == 'f') {
    const auto family = FAMILIES.find(wanted);
    const bool member = family == FAMILIES.end() ? here == wanted : family->second.count(here) > 0;
    return member ? "" : value + " runs on its family alone, this is " + gpu.text();
  }
  if (here != wanted && (TEGRA.count(here) || TEGRA.count(wanted)))
    return value + " does not run on " + gpu.text() + ": machine code of Tegra and of other GPUs is for one capability alone";
  if (here.first == wanted.first && here.second >= wanted.second) return "";
  return value + " runs on " + std::to_string(major) + ".x from " + std::to_string(minor) + " on, this is " + gpu.text();
}

std::string reject_need(const std::string& name, const std::string& value, const Host& host) {
  if (name == "arch") {
    utsname here{};
    uname(&here);
    return value == here.machine ? "" : "built for machine " + value + ", this host is " + here.machine;
  }
  if (name == "cpu") return reject_cpu(value);
  if (name == "torch") {
    const auto wanted = most(version(value), 2);
    return !wanted.empty() && wanted == most(version(host.torch), 2) ? "" : "built with torch " + value + ", libtorch here is " + host.torch + "; rebuild";
  }
  if (name == "cuda") {
    const bool same = !host.cuda.empty() && most(version(host.cuda), 1) == most(version(value), 1);
    const auto wanted = version(value);
    return same ? "" : "needs a torch for CUDA " + (wanted.empty() ? value : text_of(wanted[0])) + ".x, this one is for " + (host.cuda.empty() ? "no CUDA" : host.cuda);
  }
  if (name == "glibc") {
    const auto wanted = version(value);
    return !wanted.empty() && version(gnu_get_libc_version()) >= wanted ? "" : "needs glibc " + value + " or newer, this host has " + gnu_get_libc_version();
  }
  if (name == "libstdcxx") return "";                // the dynamic loader judges that one
  if (name != "cubin" && name != "shared") return "needs " + name + " " + repr(first(value, 80)) + ", which this client cannot judge";
  if (!host.gpu) return "no CUDA device";
  if (name == "cubin") return reject_cubin(value, *host.gpu);
  const auto least = SHARED_BYTES.find({host.gpu->major, host.gpu->minor});
  if (least == SHARED_BYTES.end() || saturated(value) <= least->second) return "";
  return "needs " + value + " bytes of shared memory a block, " + host.gpu->text() + " has " + std::to_string(least->second);
}

}  // namespace

std::string kind_of(const std::string& device) { return device.substr(0, device.find(':')); }

std::string reject_variant(const VariantRecord& variant, const Host& host) {
  if (variant.kind != "aoti") return "is a " + repr(first(variant.kind, 40)) + " artifact, which this client cannot load";
  const std::string& wanted = variant.target->device;
  const std::string elsewhere = "is for " + first(wanted, 40) + ", this session is for " + host.device;
  if (wanted != kind_of(host.device)) {
    const bool here = wanted == "cpu" || (wanted == "cuda" && Driver::device_files());
    if (here) return elsewhere;
    std::string upper = first(wanted, 40);
    for (char& c : upper) c = c >= 'a' && c <= 'z' ? char(c - 'a' + 'A') : c;
    return "no " + upper + " device";
  }
  for (const auto& [name, value] : variant.target->needs) {
    const std::string reason = reject_need(name, value, host);
    if (!reason.empty()) return reason;
  }
  if (!variant.files.count("model.so")) return "holds no model.so";
  if (variant.files.count("model.json")) return "has operators without a C shim (model.json), which torch runs";
  return "";
}

}  // namespace aotpack
