/* Writes queries, keys and values in the staging format (docs/staging.md), for engines in C and C++. C99, no other
   file.

   kvtrace_staging *staged = kvtrace_staging_open("staged");
   kvtrace_staging_add(staged, 0, "k", 0, "F16", 2, 128, 64, keys, 128 * 64 * 2, 64 * 2);
   kvtrace_staging_text(staged, "/model@name", "model");
   kvtrace_staging_integers(staged, "/tokens/ids", ids, 128, 0);
   if (kvtrace_staging_finish(staged) != 0) fprintf(stderr, "%s\n", kvtrace_staging_error(staged));
   kvtrace_staging_free(staged);

   Functions return 0, or -1 after a failure. After a failure all later calls fail too, so it is enough to check the
   last one; kvtrace_staging_error() is the message of the first failure. Then `kvreplay convert staged -o trace.h5`
   makes the trace. Elements are little-endian, as on all machines that these engines support. */
#ifndef KVTRACE_STAGING_H
#define KVTRACE_STAGING_H

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Tensors are kept in memory up to this size, then written as one file. */
#define KVTRACE_STAGING_FILE_BYTES ((size_t)64 << 20)

typedef struct {
  char* bytes;
  size_t size, room;
} kvtrace_buffer;

typedef struct {
  char folder[3072];
  char error[4096];
  int failed;
  int files;
  kvtrace_buffer header; /* JSON entries of the tensors in `elements` */
  kvtrace_buffer elements;
  kvtrace_buffer objects; /* JSON entries of the metadata */
} kvtrace_staging;

static inline int kvtrace_fail(kvtrace_staging* staged, const char* what, const char* detail) {
  if (!staged->failed) snprintf(staged->error, sizeof staged->error, "%.200s: %.3000s", what, detail);
  staged->failed = 1;
  return -1;
}

static inline const char* kvtrace_staging_error(const kvtrace_staging* staged) { return staged->error; }

static inline int kvtrace_append(kvtrace_staging* staged, kvtrace_buffer* to, const void* bytes, size_t size) {
  if (staged->failed) return -1;
  if (size > to->room - to->size) {
    const size_t room = 2 * (to->size + size) + 4096;
    char* grown = (char*)realloc(to->bytes, room);
    if (grown == NULL) return kvtrace_fail(staged, staged->folder, "out of memory");
    to->bytes = grown;
    to->room = room;
  }
  if (size > 0) memcpy(to->bytes + to->size, bytes, size);
  to->size += size;
  return 0;
}

static inline int kvtrace_print(kvtrace_staging* staged, kvtrace_buffer* to, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return kvtrace_append(staged, to, text, strlen(text));
}

/* A JSON string of a text in UTF-8. */
static inline int kvtrace_quote(kvtrace_staging* staged, kvtrace_buffer* to, const char* text, size_t size) {
  kvtrace_append(staged, to, "\"", 1);
  for (size_t i = 0; i < size; ++i) {
    const unsigned char c = (unsigned char)text[i];
    if (c == '"' || c == '\\' || c < 0x20)
      kvtrace_print(staged, to, "\\u%04x", c);
    else
      kvtrace_append(staged, to, text + i, 1);
  }
  return kvtrace_append(staged, to, "\"", 1);
}

/* Writes FOLDER/NAME: the length of the header, the header, the elements. */
static inline int kvtrace_write(kvtrace_staging* staged, const char* name, const kvtrace_buffer* header,
                                const kvtrace_buffer* elements) {
  char path[sizeof staged->folder + 64], partial[sizeof path + 16];
  unsigned char length[8];
  if (staged->failed) return -1;
  snprintf(path, sizeof path, "%s/%s", staged->folder, name);
  snprintf(partial, sizeof partial, "%s.partial", path);
  const uint64_t bytes = (uint64_t)header->size + 2;
  for (int i = 0; i < 8; ++i) length[i] = (unsigned char)(bytes >> (8 * i));
  FILE* file = fopen(partial, "wb");
  if (file == NULL) return kvtrace_fail(staged, partial, strerror(errno));
  int good = fwrite(length, 8, 1, file) == 1 && fputc('{', file) != EOF &&
             fwrite(header->bytes, 1, header->size, file) == header->size && fputc('}', file) != EOF &&
             (elements == NULL || fwrite(elements->bytes, 1, elements->size, file) == elements->size);
  good = fclose(file) == 0 && good;
  if (!good || rename(partial, path) != 0) return kvtrace_fail(staged, path, strerror(errno));
  return 0;
}

static inline int kvtrace_write_tensors(kvtrace_staging* staged) {
  char name[64];
  if (staged->header.size == 0) return staged->failed ? -1 : 0;
  snprintf(name, sizeof name, "tensors-%05d.safetensors", staged->files++);
  if (kvtrace_write(staged, name, &staged->header, &staged->elements) != 0) return -1;
  staged->header.size = staged->elements.size = 0;
  return 0;
}

/* `folder` exists and is empty. NULL: out of memory, or the path is too long. */
static inline kvtrace_staging* kvtrace_staging_open(const char* folder) {
  kvtrace_staging* staged = (kvtrace_staging*)calloc(1, sizeof *staged);
  if (staged == NULL || strlen(folder) >= sizeof staged->folder) {
    free(staged);
    return NULL;
  }
  strcpy(staged->folder, folder);
  return staged;
}

/* Tokens begin, begin + 1, ... of q, k or v of a stored layer: [heads, tokens, components] of type F16, BF16 or F32.
   The components of a vector are contiguous. `head_bytes` and `token_bytes` lead from a vector to that of the next head
   and of the next token. The elements are copied. */
static inline int kvtrace_staging_add(kvtrace_staging* staged, int layer, const char* tensor, int64_t begin,
                                      const char* dtype, int64_t heads, int64_t tokens, int64_t components,
                                      const void* elements, size_t head_bytes, size_t token_bytes) {
  const size_t row = (size_t)components * (strcmp(dtype, "F32") == 0 ? 4 : 2);
  const size_t first = staged->elements.size;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t token = 0; token < tokens; ++token)
      kvtrace_append(staged, &staged->elements,
                     (const char*)elements + (size_t)head * head_bytes + (size_t)token * token_bytes, row);
  kvtrace_print(
      staged, &staged->header,
      "%s\"layers.%d.%.20s@%lld\":{\"dtype\":\"%.8s\",\"shape\":[%lld,%lld,%lld],\"data_offsets\":[%llu,%llu]}",
      staged->header.size > 0 ? "," : "", layer, tensor, (long long)begin, dtype, (long long)heads, (long long)tokens,
      (long long)components, (unsigned long long)first, (unsigned long long)staged->elements.size);
  if (!staged->failed && staged->elements.size >= KVTRACE_STAGING_FILE_BYTES) return kvtrace_write_tensors(staged);
  return staged->failed ? -1 : 0;
}

static inline int kvtrace_key(kvtrace_staging* staged, const char* object) {
  if (staged->objects.size > 0) kvtrace_append(staged, &staged->objects, ",", 1);
  kvtrace_quote(staged, &staged->objects, object, strlen(object));
  return kvtrace_append(staged, &staged->objects, ":", 1);
}

/* Objects of the trace format (traces/FORMAT.md), by their paths. */
static inline int kvtrace_staging_text(kvtrace_staging* staged, const char* object, const char* text) {
  kvtrace_key(staged, object);
  return kvtrace_quote(staged, &staged->objects, text, strlen(text));
}

static inline int kvtrace_staging_integer(kvtrace_staging* staged, const char* object, int64_t value) {
  kvtrace_key(staged, object);
  return kvtrace_print(staged, &staged->objects, "%lld", (long long)value);
}

/* 17 digits restore the number. -infinity becomes null. */
static inline int kvtrace_append_number(kvtrace_staging* staged, double value) {
  if (isinf(value) && value < 0) return kvtrace_print(staged, &staged->objects, "null");
  if (!isfinite(value)) return kvtrace_fail(staged, "value", "NaN or infinity");
  return kvtrace_print(staged, &staged->objects, "%.17g", value);
}

static inline int kvtrace_staging_number(kvtrace_staging* staged, const char* object, double value) {
  kvtrace_key(staged, object);
  return kvtrace_append_number(staged, value);
}

/* Brackets before and after element i of a dataset [rows, columns], or [rows] if `columns` is 0. */
static inline void kvtrace_separate(kvtrace_staging* staged, size_t i, size_t columns) {
  if (i > 0)
    kvtrace_append(staged, &staged->objects, columns > 0 && i % columns == 0 ? "],[" : ",",
                   columns > 0 && i % columns == 0 ? 3 : 1);
}

static inline int kvtrace_staging_integers(kvtrace_staging* staged, const char* object, const int32_t* values,
                                           size_t rows, size_t columns) {
  kvtrace_key(staged, object);
  kvtrace_append(staged, &staged->objects, "[[", columns > 0 ? 2 : 1);
  for (size_t i = 0; i < rows * (columns > 0 ? columns : 1); ++i) {
    kvtrace_separate(staged, i, columns);
    kvtrace_print(staged, &staged->objects, "%ld", (long)values[i]);
  }
  return kvtrace_append(staged, &staged->objects, "]]", columns > 0 ? 2 : 1);
}

static inline int kvtrace_staging_numbers(kvtrace_staging* staged, const char* object, const double* values,
                                          size_t rows, size_t columns) {
  kvtrace_key(staged, object);
  kvtrace_append(staged, &staged->objects, "[[", columns > 0 ? 2 : 1);
  for (size_t i = 0; i < rows * (columns > 0 ? columns : 1); ++i) {
    kvtrace_separate(staged, i, columns);
    kvtrace_append_number(staged, values[i]);
  }
  return kvtrace_append(staged, &staged->objects, "]]", columns > 0 ? 2 : 1);
}

/* Writes the rest of the tensors, then the metadata. The state remains valid for kvtrace_staging_error(). */
static inline int kvtrace_staging_finish(kvtrace_staging* staged) {
  kvtrace_buffer header = {NULL, 0, 0};
  kvtrace_write_tensors(staged);
  kvtrace_append(staged, &staged->objects, "}", 1);
  kvtrace_print(staged, &header, "\"__metadata__\":{\"kvtrace_staging\":\"1\",\"kvtrace\":");
  /* The objects are a JSON text within a JSON text. */
  kvtrace_buffer text = {NULL, 0, 0};
  kvtrace_append(staged, &text, "{", 1);
  if (!staged->failed) kvtrace_append(staged, &text, staged->objects.bytes, staged->objects.size);
  if (!staged->failed) kvtrace_quote(staged, &header, text.bytes, text.size);
  kvtrace_append(staged, &header, "}", 1);
  kvtrace_write(staged, "header.safetensors", &header, NULL);
  free(header.bytes);
  free(text.bytes);
  return staged->failed ? -1 : 0;
}

static inline void kvtrace_staging_free(kvtrace_staging* staged) {
  if (staged == NULL) return;
  free(staged->header.bytes);
  free(staged->elements.bytes);
  free(staged->objects.bytes);
  free(staged);
}

#ifdef __cplusplus
}
#endif

#endif
