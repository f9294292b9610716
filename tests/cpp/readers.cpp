// What the C++ client makes of many files: readers index FILE, readers weights FOLDER NAME...
//
// FILE holds indexes, each after its length (8 bytes, little-endian); the others are weights files of a folder. Writes for
// each a line: "ok", or "no: " and why.
#include <fstream>
#include <iostream>

#include "aotpack/weights.hpp"

namespace {

template <typename Read>
void tell(const Read& read) {
  try {
    read();
    std::cout << "ok\n";
  } catch (const aotpack::Error& error) {
    std::string text = error.what();
    for (char& c : text) c = c == '\n' ? '|' : c;
    std::cout << "no: " << text << "\n";
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  if (words[1] == std::string("index")) {
    std::ifstream file(words[2], std::ios::binary);
    std::uint64_t size = 0;
    while (file.read(reinterpret_cast<char*>(&size), 8)) {
      std::string text(size, '\0');
      file.read(text.data(), std::streamsize(size));
      tell([&] { aotpack::Index::parse(text); });
    }
    return 0;
  }
  for (int n = 3; n < count; ++n) tell([&] { aotpack::WeightsFile(aotpack::Member(words[2], words[n])); });
}
