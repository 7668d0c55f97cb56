// Passes that repeat the prompt, in a trace: the rules that they obey.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "error.h"
#include "trace/synth.h"
#include "trace/trace.h"
#include "trace/writer.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class TracesWithPasses : public TraceFiles {
 protected:
  /// The rule that a changed header breaks.
  std::string broken(const std::function<void(TraceHeader&)>& change) {
    SynthOptions options = synth_defaults("fixture");
    options.repeated = 7;
    options.existing = Existing::replace;
    synthesise(options, file("trace.h5"));
    TraceHeader header = Trace::open(file("trace.h5")).header();
    change(header);
    try {
      const TraceWriter writer(file("other.h5"), header, Existing::replace);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(TracesWithPasses, ObeyTheRules) {
  EXPECT_EQ(broken([](TraceHeader&) {}), "");
  const auto of_passes = [this](std::size_t element, int number) {
    return broken([=](TraceHeader& header) { header.reconstruction_passes[element] = number; });
  };
  for (const auto& [element, number] : {std::pair{0, 0}, {0, 21}, {3, 19}, {1, 7}, {2, 0}, {5, 13}, {4, 2}, {2, 12}})
    EXPECT_NE(of_passes(static_cast<std::size_t>(element), number).find("/reconstruction/passes: value"),
              std::string::npos)
        << element << " " << number;
  EXPECT_NE(broken([](TraceHeader& header) { ++header.reconstruction_ids[5]; }).find("/reconstruction/ids: value"),
            std::string::npos);
  EXPECT_EQ(broken([](TraceHeader& header) { ++header.reconstruction_ids[1]; }), "") << "of the instruction";
  EXPECT_NE(broken([](TraceHeader& header) { header.reconstruction_boundary = 11; }), "") << "token 11 is repeated";
  EXPECT_NE(broken([](TraceHeader& header) { header.reconstruction_boundary = 13; }), "") << "the prompt has 12 tokens";
}

TEST_F(TracesWithPasses, HaveAnotherHashThanThoseWithout) {
  SynthOptions options = synth_defaults("fixture");
  options.repeated = 7;
  synthesise(options, file("trace.h5"));
  const Trace trace = Trace::open(file("trace.h5"));
  ASSERT_EQ(trace.header().passes().size(), 2U);
  EXPECT_EQ(trace.header().passes()[1].begin, 11);
  EXPECT_EQ(trace.header().passes()[1].tokens(), 9);
  options.repeated = 0;
  options.existing = Existing::replace;
  synthesise(options, file("plain.h5"));
  EXPECT_NE(Trace::open(file("plain.h5")).hash(), trace.hash());
}

}  // namespace
}  // namespace kvreplay
