// What an op throws; ONNX Runtime gets it as an error status.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace eagle {

// A fault of the inputs, the attributes or the machine. The message is made of the parts, one after another.
class Error : public std::runtime_error {
 public:
  template <class... Parts>
  explicit Error(const Parts&... parts) : std::runtime_error(joined(parts...)) {}

 private:
  template <class... Parts>
  static std::string joined(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
  }
};

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw Error(parts...);
}

}  // namespace eagle
