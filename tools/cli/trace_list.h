// Traces as users name them: files, folders, globs and manifests; and the part of them that is one machine's.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"

namespace kvreplay {

struct ListedTrace {
  std::string path;
  std::string hash = {};   // as a manifest states it; empty: nothing was stated
  std::string where = {};  // the line of the manifest
};

/// The traces of each name, in the order of the names. A name is a file, a folder (every *.h5 in it, by name), a glob
/// (every *.h5 that matches or is in a folder that does, by name) or a manifest: a .csv with a column trace_hash, and a
/// column file with paths that are relative to the manifest, or name, for NAME.h5 beside it. Files of stored
/// observables are left out where something else is named. Relative names are relative to `folder`. Throws Error{input}
/// for a name that stands for nothing and for a manifest that is none.
std::vector<ListedTrace> list_traces(std::span<const GivenValue> names, const std::filesystem::path& folder = {});

/// The same of operands of a command line.
std::vector<ListedTrace> list_traces(std::span<const std::string> operands);

/// Details of commands with such operands.
std::string trace_list_help();

/// Throws Error{input}, at the line of the manifest, where the trace that was opened has another hash.
void check_hash(const ListedTrace& listed, const std::string& hash);

/// One of `count` shards, from 1.
struct Shard {
  int number = 1;
  int count = 1;

  /// "2/8". Throws Error{usage}.
  static Shard parse(const std::string& where, std::string_view text);

  /// Its traces, in the order of the list; each is in one of the shards. They are dealt out by size, the largest first,
  /// each to the shard that has least: the same on every machine that sees the same files. May be none.
  std::vector<ListedTrace> of(const std::vector<ListedTrace>& all) const;
};

}  // namespace kvreplay
