// What the writer writes, the reader reads: every field, every type, and the hash of both.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "edited_file.h"
#include "error.h"
#include "float_types.h"
#include "hash.h"
#include "hdf5/hdf5.h"
#include "random.h"
#include "trace/compare.h"
#include "trace/header.h"
#include "trace/synth.h"
#include "trace/validate.h"
#include "trace/writer.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

/// Every field set, none to its default.
TraceHeader full_header() {
  TraceHeader header;
  header.producer = "unit test 1.0";
  header.created = "2024-01-02T03:04:05Z";
  header.synthetic = true;
  header.model = "a model \xCE\xB8";
  header.architecture = "TestForCausalLM";
  header.layers = 2;
  header.query_heads = 4;
  header.kv_heads = 2;
  header.head_dim = 6;
  header.dtype = DType::bfloat16;
  header.softmax_scale = 0.3;
  header.logit_softcap = 50;
  header.source_hash = std::string(64, 'a');
  header.quantisation = "4bit";
  header.other_state = R"([{"kind": "conv", "layers": [0, 4], "bytes": 96}])";
  header.value_dim = 5;
  header.visible_block = 3;
  header.heads = {4, 2, 4, 2};
  header.head_dims = {6, 5, 6, 5};
  header.kv_source = {0, 1};
  header.sliding_window = {0, 5};
  header.sinks = {0.5, -HUGE_VAL, -1, 2, 0, 0, 0, 0.25};
  header.chunk = {0, 4};
  header.layer_index = {3, 7};
  header.has_rope = true;
  header.rope_interleaved = true;
  header.rope_pairs = 2;
  header.layer_pairs = {2, 1};
  header.rope_offset = 2;
  header.inv_freq = {1, 0.5, 0, 0};
  header.attention_scaling = {1.25, 1};
  header.prefill = 5;
  header.ids = {5, 4, 3, 2, 1, 0, 7};
  header.offsets = {0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 6};
  header.text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80xy";  // 6 characters in 12 bytes
  header.spans = {{"needle", "needle", 1, 3}, {"na\xC3\xAFve", "question", 3, 5}};
  header.reference_ids = {4, 2, 0, 7, 1, 3};
  header.reference_log_probabilities = {-0.5, -1, -2, -0.25, -2, -4};
  header.reference_tail = {0.0625, 0.125};
  return header;
}

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  // No exponent of all ones in any of the three types: the two top bits of each byte stay clear.
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(chain(seed, i) & 0x3FU);
  return bytes;
}

struct Written {
  std::vector<std::byte> q, k, v, wo;
};

class RoundTrip : public TraceFiles {
 protected:
  /// Rows arrive `rows_at_once` at a time, the three tensors taking turns.
  std::vector<Written> write(const std::string& name, DType dtype, const std::vector<std::int32_t>& positions,
                             std::size_t rows_at_once, const TraceHeader& header = full_header(), bool wo = true) {
    TraceWriter writer(file(name), header, Existing::replace);
    std::vector<Written> all;
    for (int l = 0; l < header.layers; ++l) {
      const std::size_t row = static_cast<std::size_t>(header.head_dim) * size_of(dtype);
      const std::size_t value_row = static_cast<std::size_t>(header.value_components()) * size_of(dtype);
      const std::size_t projection_columns = 4 * static_cast<std::size_t>(header.value_components());
      const auto tokens = static_cast<std::size_t>(header.tokens());
      const std::size_t queries = positions.empty() ? tokens : positions.size();
      const auto seed = static_cast<std::uint64_t>(l);
      Written w{random_bytes(4 * queries * row, seed * 10), random_bytes(2 * tokens * row, seed * 10 + 1),
                random_bytes(header.stores_values() ? 2 * tokens * value_row : 0, seed * 10 + 2),
                random_bytes(10 * projection_columns * size_of(dtype), seed * 10 + 3)};
      writer.begin_layer(dtype, positions);
      for (std::size_t first = 0; first * row < w.q.size() || first * row < w.k.size(); first += rows_at_once) {
        const auto piece = [&](const std::vector<std::byte>& from, std::size_t row_bytes) {
          const std::size_t begin = std::min(first * row_bytes, from.size());
          const std::size_t end = std::min((first + rows_at_once) * row_bytes, from.size());
          return std::span(from).subspan(begin, end - begin);
        };
        writer.append_q(piece(w.q, row));
        writer.append_k(piece(w.k, row));
        if (header.stores_values()) writer.append_v(piece(w.v, value_row));
      }
      if (wo) {
        const std::string object = object_in_layer(schema().entry("/layers/{layer}/wo"), l);
        writer.begin_tensor(object, dtype, {10, projection_columns});
        writer.write_tokens(object, 0, w.wo);
      }
      all.push_back(std::move(w));
    }
    writer.finish();
    return all;
  }

  std::string refusal(auto action) {
    try {
      action();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

bool equal(const TensorView& view, const std::vector<std::byte>& bytes) {
  return view.bytes() == bytes.size() && std::memcmp(view.data, bytes.data(), bytes.size()) == 0;
}

TEST_F(RoundTrip, EveryHeaderFieldAndEveryTypeComesBack) {
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32})
    for (const std::vector<std::int32_t>& positions : {std::vector<std::int32_t>{}, {0, 4, 6}})
      for (const std::size_t rows_at_once : {1U, 5U, 1000U}) {
        const std::vector<Written> written = write("trace.h5", dtype, positions, rows_at_once);
        EXPECT_FALSE(std::filesystem::exists(file("trace.h5.partial")));
        const Trace trace = Trace::open(file("trace.h5"));
        for (int l = 0; l < 2; ++l) {
          const LayerTensors layer = trace.layer(l);
          const Written& w = written[static_cast<std::size_t>(l)];
          EXPECT_TRUE(equal(layer.q, w.q) && equal(layer.k, w.k) && equal(layer.v, w.v));
          EXPECT_EQ(layer.q.dtype, dtype);
          EXPECT_TRUE(std::ranges::equal(layer.query_positions, positions));
          EXPECT_EQ(layer.sliding_window, l == 0 ? 0 : 5);
          EXPECT_EQ(layer.rope.inv_freq[0], l == 0 ? 1 : 0);
          EXPECT_EQ(layer.rope.attention_scaling, l == 0 ? 1.25 : 1);
          EXPECT_TRUE(layer.rope.interleaved);
          EXPECT_EQ(layer.softmax_scale, 0.3F);
          EXPECT_EQ(layer.logit_softcap, 50.0F);
          const std::vector<StoredTensor> tensors = trace.tensors(l);
          ASSERT_EQ(tensors.size(), 4U);
          EXPECT_TRUE(equal(tensors[3].view, w.wo));
          EXPECT_EQ(tensors[3].shape, (std::vector<int>{10, 20}));
          EXPECT_EQ(layer.sink(1), l == 0 ? -HUGE_VAL : 0.0);
          EXPECT_EQ(layer.sink(3), l == 0 ? 2.0 : 0.25);
          EXPECT_EQ(layer.first_visible(6), l == 0 ? 0 : 4);
          EXPECT_EQ(layer.end_of_queries(1), l == 0 ? std::numeric_limits<int>::max() : 4);
          for (const StoredTensor& tensor : tensors)
            EXPECT_EQ(tensor.xxh3, hash_of({tensor.view.data, tensor.view.bytes()})) << tensor.path;
        }
        EXPECT_EQ(trace.name(), "trace");
        EXPECT_TRUE(validate_deep(trace).problems.empty());
      }
}

/// Every object the schema names has a place in the header, and comes back through the file as it was.
TEST_F(RoundTrip, HeaderValues) {
  write("trace.h5", DType::float16, {}, 3);
  const Trace trace = Trace::open(file("trace.h5"));
  const TraceHeader header = full_header();
  int values = 0;
  for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
    for (const SchemaEntry& entry : *entries) {
      if (entry.per_layer() || entry.object == "/model@value_is_key") continue;  // not beside value_dim
      if (entry.object.starts_with("/reconstruction")) continue;                 // has tensors: reconstruction.cpp
      const auto before = header_value(header, entry), after = header_value(trace.header(), entry);
      ASSERT_TRUE(before && after) << entry.object;
      ++values;
      EXPECT_TRUE(*before == *after) << entry.object;
    }
  EXPECT_EQ(values, 40);
  EXPECT_EQ(trace.header().rope_pairs, 2);
}

TEST_F(RoundTrip, ValuesMayBeComponentsOfTheKeys) {
  TraceHeader header = full_header();
  header.value_dim = 0;
  header.head_dims.clear();
  header.value_is_key = 4;
  const std::vector<Written> written = write("trace.h5", DType::float16, {}, 3, header);
  const Trace trace = Trace::open(file("trace.h5"));
  EXPECT_EQ(version_of(trace.header()), 2);
  const LayerTensors layer = trace.layer(1);
  EXPECT_EQ(trace.tensors(1).size(), 3U);
  EXPECT_EQ(layer.v.dim, 4);
  for (int head = 0; head < 2; ++head)
    for (int t = 0; t < header.tokens(); ++t)
      EXPECT_EQ(std::memcmp(layer.v.row(head, t), layer.k.row(head, t), layer.v.row_bytes()), 0);
  EXPECT_EQ(widened(layer.v).size(), 2U * 7 * 4);
}

TEST_F(RoundTrip, OptionalObjectsMayBeLeftOut) {
  TraceHeader header = full_header();
  header.value_dim = 0;
  header.rope_offset = 0;
  header.heads.clear();
  header.head_dims.clear();
  header.kv_source.clear();
  header.layer_pairs.clear();
  header.sinks.clear();
  header.chunk.clear();
  header.has_rope = false;
  header.source_hash.clear();
  header.quantisation.clear();
  header.other_state.clear();
  header.reference_ids.clear();
  header.text.clear();
  header.offsets.clear();
  header.spans.clear();
  header.created.clear();
  write("trace.h5", DType::float32, {}, 3, header, false);
  const Trace trace = Trace::open(file("trace.h5"));
  EXPECT_FALSE(trace.header().has_rope);
  EXPECT_TRUE(trace.header().inv_freq.empty());
  EXPECT_TRUE(trace.layer(0).rope.inv_freq.empty());
  EXPECT_TRUE(trace.header().text.empty());
  EXPECT_TRUE(trace.header().reference_tail.empty());
  EXPECT_EQ(trace.header().created.size(), 20U);
  EXPECT_EQ(trace.tensors(0).size(), 3U);
}

TEST_F(RoundTrip, DataIsAlignedAndTheSuperblockIsChecksummed) {
  SynthOptions options = synth_defaults("gaussian");
  synthesise(options, file("trace.h5"));
  const hdf5::File opened = hdf5::File::open(file("trace.h5"));
  for (const char* name : {"layers/000/q", "layers/003/k", "layers/003/v"})
    EXPECT_EQ(*opened.dataset(name).offset() % 4096, 0U) << name;
  std::ifstream bytes(file("trace.h5"), std::ios::binary);
  char superblock[9];
  bytes.read(superblock, 9);
  EXPECT_GE(superblock[8], 2);
}

TEST_F(RoundTrip, TheHashIsOfContentsAlone) {
  write("a.h5", DType::float16, {}, 1);
  TraceHeader header = full_header();
  header.producer = "another";
  header.other_state.clear();
  header.created = "2025-01-01T00:00:00Z";
  write("b.h5", DType::float16, {}, 100, header);
  const std::string hash = Trace::open(file("a.h5")).hash();
  EXPECT_EQ(Trace::open(file("b.h5")).hash(), hash);
  EXPECT_EQ(hash.size(), 32U);

  const auto changed = [&](auto change) {
    TraceHeader other = full_header();
    change(other);
    write("c.h5", DType::float16, {}, 3, other);
    return Trace::open(file("c.h5")).hash();
  };
  EXPECT_NE(changed([](TraceHeader& h) { h.model += "x"; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.softmax_scale = 0.31; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.ids[3] += 1; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.spans[0].end += 1; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.has_rope = false; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.layer_pairs = {2, 2}; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.quantisation = "8bit"; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.reference_tail[1] += 0.5; }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.reference_ids.clear(); }), hash);
  EXPECT_NE(changed([](TraceHeader& h) { h.text.clear(), h.offsets.clear(); }), hash);
  EXPECT_EQ(changed([](TraceHeader&) {}), hash);
  write("c.h5", DType::bfloat16, {}, 3);
  EXPECT_NE(Trace::open(file("c.h5")).hash(), hash);
  write("c.h5", DType::float16, {}, 3, full_header(), false);
  EXPECT_NE(Trace::open(file("c.h5")).hash(), hash);
}

/// The serialisation that traces/FORMAT.md defines, written out once more for a small header.
TEST_F(RoundTrip, TheHashIsTheDocumentedSerialisation) {
  std::string bytes;
  const auto value = [&](const std::string& object, const std::string& raw) {
    const auto length = static_cast<std::uint64_t>(raw.size());
    bytes += object + '\0' + std::string(reinterpret_cast<const char*>(&length), 8) + raw;
  };
  const auto raw = [](auto... numbers) {
    std::string all;
    ((all += std::string(reinterpret_cast<const char*>(&numbers), sizeof numbers)), ...);
    return all;
  };
  TraceHeader header = full_header();
  header.layers = 1;
  header.sliding_window = {0};
  header.layer_index = {3};
  header.has_rope = false;
  header.source_hash.clear();
  header.quantisation.clear();
  header.heads.clear();
  header.head_dims = {6, 5};
  header.kv_source.clear();
  header.layer_pairs.clear();
  header.sinks.resize(4);
  header.chunk = {4};
  header.reference_ids.clear();
  header.reference_log_probabilities.clear();
  header.reference_tail.clear();
  const std::vector<Written> written = write("trace.h5", DType::bfloat16, {2, 6}, 3, header);
  value("/@version", raw(std::int64_t{2}));
  value("/@synthetic", raw(std::int64_t{1}));
  value("/model@name", header.model);
  value("/model@architecture", header.architecture);
  value("/model@n_layers", raw(std::int64_t{1}));
  value("/model@n_query_heads", raw(std::int64_t{4}));
  value("/model@n_kv_heads", raw(std::int64_t{2}));
  value("/model@head_dim", raw(std::int64_t{6}));
  value("/model@dtype", "bfloat16");
  value("/model@softmax_scale", raw(0.3));
  value("/model@logit_softcap", raw(50.0));
  value("/model@value_dim", raw(std::int64_t{5}));
  value("/model@visible_block", raw(std::int64_t{3}));
  value("/tokens@prefill", raw(std::int64_t{5}));
  value("/model/sliding_window", raw(std::int32_t{0}));
  value("/model/layer_index", raw(std::int32_t{3}));
  value("/model/head_dims", raw(6, 5));
  value("/model/sinks", raw(0.5, -HUGE_VAL, -1.0, 2.0));
  value("/model/chunk", raw(std::int32_t{4}));
  value("/tokens/ids", raw(5, 4, 3, 2, 1, 0, 7));
  value("/tokens/offsets", raw(0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 6));
  value("/tokens/text", header.text);
  using namespace std::string_literals;
  value("/spans", "needle\0needle\0"s + raw(1, 3) + "na\xC3\xAFve\0question\0"s + raw(3, 5));
  value("/layers/000/q", "bfloat16 [4, 2, 6] " + hash_of(written[0].q));
  value("/layers/000/k", "bfloat16 [2, 7, 6] " + hash_of(written[0].k));
  value("/layers/000/v", "bfloat16 [2, 7, 5] " + hash_of(written[0].v));
  value("/layers/000/q_positions", raw(2, 6));
  value("/layers/000/wo", "bfloat16 [10, 20] " + hash_of(written[0].wo));
  EXPECT_EQ(Trace::open(file("trace.h5")).hash(), hash_of(std::as_bytes(std::span(bytes))));
}

/// The same trace chunked, shuffled and deflated, as an archive would have it.
TEST_F(RoundTrip, AnArchivedTraceIsTheSameTrace) {
  const std::vector<Written> written = write("trace.h5", DType::bfloat16, {}, 3);
  std::filesystem::copy_file(file("trace.h5"), file("archive.h5"));
  {
    const hdf5::Group archive = open_writable(file("archive.h5"));
    for (const char* layer : {"layers/000", "layers/001"})
      for (const char* name : {"q", "k", "v"}) {
        const hdf5::Group group = archive.group(layer);
        const hdf5::Dataset plain = group.dataset(name);
        const hdf5::Shape shape = plain.shape();
        std::vector<std::byte> elements(static_cast<std::size_t>(hdf5::elements(shape)) * 2);
        plain.read(hdf5::Type::bfloat16(), elements.data());
        remove(group, name);
        create_deflated(group, name, hdf5::Type::bfloat16(), shape, {1, 4, 5})
            .write(hdf5::Type::bfloat16(), elements.data());
      }
  }
  const Trace plain = Trace::open(file("trace.h5")), archive = Trace::open(file("archive.h5"));
  EXPECT_TRUE(plain.states_hashes());
  EXPECT_FALSE(archive.states_hashes());
  EXPECT_EQ(archive.hash(), plain.hash());
  EXPECT_TRUE(compare(plain, archive).empty());
  EXPECT_TRUE(equal(archive.layer(1).q, written[1].q));
  EXPECT_TRUE(equal(archive.layer(0).v, written[0].v));
  EXPECT_EQ(archive.tensor_bytes(), plain.tensor_bytes());
}

TEST_F(RoundTrip, UnknownObjectsAreIgnored) {
  write("trace.h5", DType::float16, {}, 3);
  {
    hdf5::Group more = open_writable(file("trace.h5"));
    more.set_attribute("mood", "sunny");
    more.create_group("later").write("numbers", std::vector<double>{1, 2, 3});
    more.group("layers").create_group("002");
  }
  write("plain.h5", DType::float16, {}, 3);
  EXPECT_EQ(Trace::open(file("trace.h5")).hash(), Trace::open(file("plain.h5")).hash());
}

TEST_F(RoundTrip, TheWriterRefusesWhatTheReaderWould) {
  const auto header_refusal = [&](auto change) {
    TraceHeader header = full_header();
    change(header);
    return refusal([&] { TraceWriter(file("x.h5"), header); });
  };
  const std::string at = file("x.h5").string();
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.heads.clear(), h.kv_heads = 3; }),
            at + ":/model@n_kv_heads: value: expected a divisor of 4 (Hq), found 3");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.heads[3] = 3, h.kv_heads = 3; }),
            at + ":/model/heads: value: expected a divisor of 4 (Hq), found 3 at element 3");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.head_dims[0] = h.head_dims[2] = 5; }),
            at + ":/model@head_dim: value: expected 5, the largest in /model/head_dims, found 6");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.kv_source = {1, 1}; }),
            at + ":/model/kv_source: value: expected 0 or an earlier layer with keys and values, found 1 at element 0");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.kv_source = {0, 0}; }),
            at + ":/model/sliding_window: value: expected in layer 1 the KV heads, dimensions, window, chunks and RoPE "
                 "of layer 0, whose keys it reads, found others");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.value_dim = 0, h.value_is_key = 6; }),
            at + ":/model/head_dims: beside /model@value_is_key: expected one of the two, found a dataset");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.layer_pairs[0] = 3, h.inv_freq.resize(6), h.rope_pairs = 3; }),
            at + ":/model/rope/pairs: shape: expected at most 2 pairs (offset + 2r <= d), found 3");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.layers = 3; }),
            at + ":/model/sliding_window: shape: expected [3], found [2]");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.inv_freq.pop_back(); }),
            at + ":/model/rope/inv_freq: shape: expected [2, r], found [3]");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.rope_pairs = 1; }),
            at + ":/model/rope/inv_freq: shape: expected 1 pairs, found 2");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.text += "\xFF"; }),
            at + ":/tokens/text: value: expected UTF-8, found byte 0xff at 12");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.offsets[13] = 7; }),
            at + ":/tokens/offsets: range: expected begin <= end <= 6 characters, found [5, 7) at token 6");
  EXPECT_EQ(header_refusal([](TraceHeader& h) { h.spans[0].kind = ""; }),
            at + ":/spans: kind: expected UTF-8, at least one character, found none in span 0");
  EXPECT_TRUE(std::filesystem::is_empty(folder()));

  const std::vector<std::byte> row(6 * 2);
  TraceWriter writer(file("x.h5"), full_header());
  EXPECT_EQ(refusal([&] { writer.append_q(row); }), at + ":/layers: rows: expected a layer that was begun, found none");
  EXPECT_EQ(refusal([&] { writer.begin_layer(DType::float16, std::vector<std::int32_t>{1, 7}); }),
            at + ":/layers/000/q_positions: value: expected below 7 (T), found 7 at element 1");
}

TEST_F(RoundTrip, TheWriterCountsRowsAndLayers) {
  const std::string at = file("x.h5").string();
  const std::vector<std::byte> row(6 * 2);
  {
    TraceWriter writer(file("x.h5"), full_header());
    writer.begin_layer(DType::float16);
    EXPECT_EQ(refusal([&] { writer.append_k(std::span(row).first(5)); }),
              at + ":/layers/000/k: rows: expected at most 14 rows of 12 bytes, found 5 bytes");
    for (int i = 0; i < 14; ++i) writer.append_k(row);
    EXPECT_EQ(refusal([&] { writer.append_k(row); }),
              at + ":/layers/000/k: rows: expected at most 0 rows of 12 bytes, found 12 bytes");
    EXPECT_EQ(refusal([&] { writer.begin_layer(DType::float16); }), at + ":/layers/000/q: rows: expected 28, found 0");
    EXPECT_EQ(refusal([&] { writer.finish(); }), at + ":/layers/000/q: rows: expected 28, found 0");
    EXPECT_TRUE(std::filesystem::exists(file("x.h5.partial")));
    EXPECT_FALSE(std::filesystem::exists(file("x.h5")));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder()));
  TraceWriter writer(file("x.h5"), full_header());
  EXPECT_EQ(refusal([&] { writer.finish(); }), at + ":/layers: layers: expected 2, found 0");
}

TEST_F(RoundTrip, AnExistingFileIsLeftAloneUnlessAsked) {
  std::ofstream(file("x.h5")) << "precious";
  EXPECT_EQ(refusal([&] { TraceWriter(file("x.h5"), full_header()); }),
            file("x.h5").string() + ": exists: expected another name, or --force to overwrite, found a file");
  EXPECT_EQ(std::filesystem::file_size(file("x.h5")), 8U);
  write("x.h5", DType::float16, {}, 3);
  EXPECT_EQ(Trace::open(file("x.h5")).header().layers, 2);
}

/// What a killed writer leaves is not a trace, under whatever name.
TEST_F(RoundTrip, WhatIsNotFinishedIsNotATrace) {
  TraceWriter writer(file("x.h5"), full_header());
  const std::filesystem::path partial = file("x.h5.partial");
  const std::string message = refusal([&] { Trace::open(partial); });
  EXPECT_NE(message, "accepted");
  EXPECT_TRUE(message.starts_with(partial.string() + ":")) << message;
}

/// A limit on file size stands for a full disk: the system answers EFBIG where it would answer ENOSPC.
class FullDisk : public RoundTrip {
 protected:
  FullDisk() {
    previous_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit_);
  }
  ~FullDisk() override {
    allow(limit_.rlim_cur);
    std::signal(SIGXFSZ, previous_);
  }
  void allow(rlim_t bytes) {
    rlimit limit = limit_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }

 private:
  rlimit limit_{};
  void (*previous_)(int) = nullptr;
};

TEST_F(FullDisk, IsSaidAndLeavesNothing) {
  SynthOptions options = synth_defaults("integer");  // 1.8 MB
  for (const rlim_t bytes : {rlim_t{1000}, rlim_t{5000}, rlim_t{100000}, rlim_t{1000000}, rlim_t{1700000}}) {
    allow(bytes);
    try {
      synthesise(options, file("x.h5"));
      ADD_FAILURE() << "written within " << bytes << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::resources) << error.what();
      EXPECT_NE(std::string(error.what()).find("disk full"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder())) << bytes;
    EXPECT_EQ(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), 0) << "HDF5 could not close the file";
  }
  allow(RLIM_INFINITY);
  synthesise(options, file("x.h5"));
  EXPECT_TRUE(std::filesystem::exists(file("x.h5")));
}

}  // namespace
}  // namespace kvreplay
