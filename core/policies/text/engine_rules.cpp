#include "policies/text/engine_rules.h"

#include <algorithm>

#include "error.h"
#include "policies/text/configured.h"

namespace kvreplay {
namespace {

using Pages = Structure::Pages;

const EngineRules engines[] = {
    // openvino.genai, cache_eviction.hpp: blocks of 32 tokens on the CPU, one set of blocks per layer; after the prompt
    // one block is evicted for each that is filled.
    {"openvino",
     Structure{.page = 32, .heads = Pages::layer},
     "schedule=decoding(32)",
     {.sinks = 32, .recent = Amount::tokens(128)}},
    // SGLang, sparsity/policies, ChunkKV: pages of all heads, scores summed over layers; the last 4 pages are read.
    {"sglang", Structure{.page = 16, .heads = Pages::layer}, "share=pooled", {.recent = Amount::tokens(64)}},
    // TensorRT-LLM, triattention.py: tokens, at most 2048 generated ones, every 128.
    {"trtllm", std::nullopt, "schedule=generated", {}},
    // vLLM, pull request 47967: pages of 16 tokens, one set of pages per KV head.
    {"vllm", Structure{.page = 16, .heads = Pages::kv}, "", {.sinks = 32, .recent = Amount::tokens(128)}},
};

}  // namespace

const EngineRules& EngineRules::named(std::string_view name) {
  const auto found = std::ranges::find(engines, name, &EngineRules::name);
  if (found == std::end(engines))
    throw Error{Refusal::usage, "--engine", "no such engine", "openvino, sglang, trtllm or vllm", std::string(name)};
  return *found;
}

std::string EngineRules::around(const std::string& policy) const {
  std::string text = structure ? structure->around(policy) : policy;
  if (parts.empty()) return text;
  text += ConfiguredPolicy::parse(text).name() == text ? ":" : ",";
  text += parts;
  ConfiguredPolicy::parse(text);
  return text;
}

}  // namespace kvreplay
