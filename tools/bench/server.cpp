#include "server.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "error.h"
#include "measurement.h"

namespace kvreplay::bench {
namespace {

class Server {
 public:
  explicit Server(const Cases& cases) : cases_(cases) {}

  std::string answer(const std::string& request) {
    std::istringstream words(request);
    std::string verb, name;
    words >> verb >> name;
    if (verb == "list") {
      std::vector<std::string> names;
      std::ranges::transform(cases_, std::back_inserter(names), &Case::name);
      return fmt::format("{{\"cases\": [\"{}\"]}}", fmt::join(names, "\", \""));
    }
    if (verb == "time") {
      int calls = 1;
      words >> calls;
      const Prepared& asked = prepared(name);
      std::vector<double> seconds;
      for (int i = 0; i < calls; ++i) seconds.push_back(seconds_of(asked.call, 1));
      return fmt::format("{{\"seconds\": [{}]}}", fmt::join(seconds, ", "));
    }
    if (verb == "check") return fmt::format("{{\"problem\": \"{}\"}}", prepared(name).check().problem);
    if (verb == "result") {
      std::string file;
      words >> file;
      const std::vector<double> numbers = prepared(name).result();
      std::ofstream(file, std::ios::binary)
          .write(reinterpret_cast<const char*>(numbers.data()),
                 static_cast<std::streamsize>(numbers.size() * sizeof(double)));
      return "{}";
    }
    throw Error{Refusal::usage, request, "unknown request", "list, time, check or result", verb};
  }

 private:
  /// Ready, and called once.
  const Prepared& prepared(const std::string& name) {
    if (!prepared_ || name != name_) {
      const auto found = std::ranges::find(cases_, name, &Case::name);
      if (found == cases_.end()) throw Error{Refusal::usage, "request", "case", "one that `list` names", name};
      prepared_.reset();
      prepared_ = found->prepare();
      prepared_->call();
      name_ = name;
    }
    return *prepared_;
  }

  const Cases& cases_;
  std::string name_;
  std::optional<Prepared> prepared_;
};

}  // namespace

void serve(const Cases& cases, std::istream& in, std::ostream& out) {
  Server server(cases);
  for (std::string request; std::getline(in, request);) {
    try {
      out << server.answer(request) << std::endl;
    } catch (const std::exception& error) {
      out << fmt::format("{{\"error\": {:?}}}", std::string_view(error.what())) << std::endl;
    }
  }
}

}  // namespace kvreplay::bench
