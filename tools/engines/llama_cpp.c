/* Runs a GGUF model in llama.cpp on a prompt and writes its queries, keys and values in the staging format.

     cc -std=c11 -O2 -I LLAMA/include -I LLAMA/ggml/include tools/engines/llama_cpp.c -L LIBRARIES -lllama -lggml \
        -lggml-base -lm -o kvtrace-llama
     kvtrace-llama MODEL.gguf PROMPT.txt FOLDER
     kvreplay convert FOLDER -o trace.h5

   Interface: llama_context_params.cb_eval (include/llama.h) is called for every node of the graph; src/llama-graph.cpp
   (build_qkv) and src/models name the nodes Qcur-LAYER, Kcur-LAYER and Vcur-LAYER, once before and once after RoPE. The
   last node of a name has RoPE and the shape [d, heads, tokens]. Read in ggml-org/llama.cpp as shipped in the package
   llama-cpp-python 0.3.36.

   Rejected, because their attention needs more than these tensors: sliding windows, RoPE factors (rope_freqs.weight)
   and scaled RoPE. Models that normalise queries after RoPE (Llama 4) name the result differently and are not
   supported. */
#include <ctype.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"
#include "kvtrace_staging.h"
#include "llama.h"

enum { CHUNK = 512 }; /* tokens of a call: one piece of each tensor */

typedef struct {
  struct ggml_tensor shape; /* of the last node of this name; `bytes` are its elements */
  char* bytes;
} node;

typedef struct {
  node* nodes; /* [layers][3]: q, k, v */
  int layers;
} observer;

static void stop(const char* where, const char* what) {
  fprintf(stderr, "kvtrace-llama: %s: %s\n", where, what);
  exit(3);
}

/* 3 * layer + tensor of a node's name; -1: another node. */
static int number_of(const char* name, int layers) {
  static const char* const prefixes[3] = {"Qcur-", "Kcur-", "Vcur-"};
  for (int tensor = 0; tensor < 3; ++tensor) {
    if (strncmp(name, prefixes[tensor], 5) != 0 || !isdigit((unsigned char)name[5])) continue;
    char* end = NULL;
    const long layer = strtol(name + 5, &end, 10);
    if (*end == '\0' && layer < layers) return 3 * (int)layer + tensor;
  }
  return -1;
}

static bool observe(struct ggml_tensor* tensor, bool ask, void* data) {
  observer* all = (observer*)data;
  const int number = number_of(tensor->name, all->layers);
  if (ask) return number >= 0;
  if (number < 0) return true;
  node* seen = &all->nodes[number];
  if (tensor->type != GGML_TYPE_F32) stop(tensor->name, "expected elements of type F32");
  seen->shape = *tensor;
  seen->bytes = (char*)realloc(seen->bytes, ggml_nbytes(tensor));
  if (seen->bytes == NULL) stop(tensor->name, "out of memory");
  ggml_backend_tensor_get(tensor, seen->bytes, 0, ggml_nbytes(tensor));
  return true;
}

/* Writes the nodes of one call, tokens begin to begin + tokens. */
static void write_pieces(kvtrace_staging* staged, const observer* all, int begin, int tokens) {
  static const char* const names[3] = {"q", "k", "v"};
  for (int number = 0; number < 3 * all->layers; ++number) {
    const node* seen = &all->nodes[number];
    if (seen->bytes == NULL || seen->shape.ne[2] != tokens || seen->shape.nb[0] != sizeof(float))
      stop(names[number % 3], "expected nodes Qcur, Kcur and Vcur of shape [d, heads, tokens] in each layer");
    kvtrace_staging_add(staged, number / 3, names[number % 3], begin, "F32", seen->shape.ne[1], tokens,
                        seen->shape.ne[0], seen->bytes, seen->shape.nb[1], seen->shape.nb[2]);
  }
}

/* A number of the model's metadata, KEY or ARCHITECTURE.KEY; `otherwise` if it is absent. */
static double metadata(const struct llama_model* model, const char* architecture, const char* key, double otherwise) {
  char name[256], value[256];
  snprintf(name, sizeof name, "%s.%s", architecture, key);
  return llama_model_meta_val_str(model, name, value, sizeof value) < 0 ? otherwise : atof(value);
}

static char* read_text(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) stop(path, strerror(errno));
  char* text = NULL;
  size_t size = 0, got = 0;
  do {
    text = (char*)realloc(text, size + 65537);
    if (text == NULL) stop(path, "out of memory");
    got = fread(text + size, 1, 65536, file);
    size += got;
  } while (got > 0);
  fclose(file);
  text[size] = '\0';
  return text;
}

static void require_plain_rope(const char* path, const struct llama_model* model) {
  char scaling[64], architecture[128], key[256];
  struct gguf_init_params parameters = {true, NULL};
  struct gguf_context* file = gguf_init_from_file(path, parameters);
  if (file == NULL) stop(path, "expected a GGUF file");
  const bool has_factors = gguf_find_tensor(file, "rope_freqs.weight") >= 0;
  gguf_free(file);
  llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
  snprintf(key, sizeof key, "%s.rope.scaling.type", architecture);
  const bool is_scaled = llama_model_meta_val_str(model, key, scaling, sizeof scaling) >= 0 && strcmp(scaling, "none");
  if (has_factors || is_scaled) stop(path, "RoPE: expected frequencies without factors or scaling");
  if (llama_model_n_swa(model) > 0) stop(path, "sliding windows are not supported");
}

static void write_metadata(kvtrace_staging* staged, const struct llama_model* model, const observer* all,
                           const llama_token* ids, int tokens) {
  char architecture[128] = "", name[256] = "";
  const int layers = all->layers, d = (int)all->nodes[0].shape.ne[0];
  llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
  if (llama_model_meta_val_str(model, "general.name", name, sizeof name) < 0) strcpy(name, architecture);
  kvtrace_staging_text(staged, "/@producer", "llama.cpp");
  kvtrace_staging_text(staged, "/model@name", name);
  kvtrace_staging_text(staged, "/model@architecture", architecture);
  kvtrace_staging_text(staged, "/model@dtype", "float32");
  kvtrace_staging_number(staged, "/model@softmax_scale",
                         metadata(model, architecture, "attention.scale", 1 / sqrt((double)d)));
  kvtrace_staging_number(staged, "/model@logit_softcap", metadata(model, architecture, "attn_logit_softcapping", 0));
  kvtrace_staging_integer(staged, "/tokens@prefill", tokens);
  kvtrace_staging_integers(staged, "/tokens/ids", ids, (size_t)tokens, 0);

  int32_t* windows = (int32_t*)calloc((size_t)layers, sizeof *windows);
  kvtrace_staging_integers(staged, "/model/sliding_window", windows, (size_t)layers, 0);
  free(windows);
  const enum llama_rope_type rope = llama_model_rope_type(model);
  if (rope == LLAMA_ROPE_TYPE_NONE) return;
  if (rope != LLAMA_ROPE_TYPE_NORM && rope != LLAMA_ROPE_TYPE_NEOX) stop(name, "RoPE of several axes is not supported");
  kvtrace_staging_text(staged, "/model/rope@style", rope == LLAMA_ROPE_TYPE_NORM ? "interleaved" : "halves");
  const int rotated = (int)metadata(model, architecture, "rope.dimension_count", d), pairs = rotated / 2;
  const double base = metadata(model, architecture, "rope.freq_base", 10000);
  double* frequencies = (double*)calloc((size_t)(layers * pairs + layers), sizeof *frequencies);
  double* scaling = frequencies + layers * pairs;
  for (int i = 0; i < layers * pairs; ++i) frequencies[i] = pow(base, -2.0 * (i % pairs) / rotated);
  for (int layer = 0; layer < layers; ++layer) scaling[layer] = 1;
  kvtrace_staging_numbers(staged, "/model/rope/inv_freq", frequencies, (size_t)layers, (size_t)pairs);
  kvtrace_staging_numbers(staged, "/model/rope/attention_scaling", scaling, (size_t)layers, 0);
  free(frequencies);
}

int main(int count, char** words) {
  if (count != 4) {
    fprintf(stderr, "usage: kvtrace-llama MODEL.gguf PROMPT.txt FOLDER\n");
    return 2;
  }
  ggml_backend_load_all();
  struct llama_model* model = llama_model_load_from_file(words[1], llama_model_default_params());
  if (model == NULL) stop(words[1], "expected a model that llama.cpp loads");
  require_plain_rope(words[1], model);

  char* text = read_text(words[2]);
  const struct llama_vocab* vocabulary = llama_model_get_vocab(model);
  const int size = (int)strlen(text);
  llama_token* ids = (llama_token*)calloc((size_t)size + 8, sizeof *ids);
  const int tokens = llama_tokenize(vocabulary, text, size, ids, size + 8, true, true);
  if (tokens < 1) stop(words[2], "expected a prompt of at least one token");

  observer all = {NULL, llama_model_n_layer(model)};
  all.nodes = (node*)calloc((size_t)(3 * all.layers), sizeof *all.nodes);
  struct llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = (uint32_t)tokens + 8;
  parameters.n_batch = parameters.n_ubatch = CHUNK;
  parameters.cb_eval = observe;
  parameters.cb_eval_user_data = &all;
  struct llama_context* context = llama_init_from_model(model, parameters);
  kvtrace_staging* staged = kvtrace_staging_open(words[3]);
  if (context == NULL || staged == NULL) stop(words[1], "out of memory");

  for (int begin = 0; begin < tokens; begin += CHUNK) {
    const int n = begin + CHUNK < tokens ? CHUNK : tokens - begin;
    if (llama_decode(context, llama_batch_get_one(ids + begin, n)) != 0) stop(words[1], "llama_decode failed");
    write_pieces(staged, &all, begin, n);
  }
  write_metadata(staged, model, &all, ids, tokens);
  if (kvtrace_staging_finish(staged) != 0) stop("output", kvtrace_staging_error(staged));

  kvtrace_staging_free(staged);
  for (int number = 0; number < 3 * all.layers; ++number) free(all.nodes[number].bytes);
  free(all.nodes);
  free(ids);
  free(text);
  llama_free(context);
  llama_model_free(model);
  return 0;
}
