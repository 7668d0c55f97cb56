// Wall time of nested pieces of work on each thread, recorded while a Profile exists.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

/// What a piece of work is for.
enum class Work { layer, read, observable, score, select, store, comparison, moments, metric, results };

struct ProfiledPiece {
  Work work;
  std::string name;  // of the observable, policy, metric or layer
  int thread;        // threads are numbered in the order of their first piece
  double begin;      // s since the profile began
  double end;
  double multiply_adds;  // products of queries with keys and of attention with values; 0: not counted
};

/// Records the pieces of all threads from its construction on. One exists at a time.
class Profile {
 public:
  Profile();
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Finished pieces, in the order of their ends.
  std::vector<ProfiledPiece> pieces() const;

 private:
  friend class Timed;
  int thread_number();
  void add(ProfiledPiece piece);

  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  mutable std::mutex adding_;
  std::vector<ProfiledPiece> pieces_;
  int threads_ = 0;
};

/// A piece of work, from construction to destruction. Costs one load while no profile exists.
class Timed {
 public:
  explicit Timed(Work work, std::string_view name = {});
  ~Timed();
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

  /// `multiply_adds` is a function that counts them, called only while a profile exists.
  template <class Count>
  void counts(Count multiply_adds) {
    if (profile_ != nullptr) piece_.multiply_adds = multiply_adds();
  }

 private:
  Profile* profile_;
  ProfiledPiece piece_{};
};

}  // namespace kvreplay
