// The Engine that Python sees: runs Commands over numpy arrays, or records them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "group.h"
#include "pool.h"

namespace voltapile {

namespace nb = nanobind;

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float>;
using Ints = Array<const std::int32_t>;
using FloatsOut = Array<float>;
using IntsOut = Array<std::int32_t>;
using BytesOut = Array<std::uint8_t>;

// A Group and the owner of its memory.
struct GroupObject {
  GroupObject(BytesOut memory, int rank, int ranks, std::int64_t room, double seconds,
              std::uintptr_t abort, std::uintptr_t waits_for, std::uintptr_t heartbeat,
              bool crowded);
  BytesOut memory;
  Group group;
};

// Commands to be run in order, and what keeps alive the memory that they point to.
struct Recording {
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  std::vector<std::unique_ptr<Command>> commands;
  std::vector<Command*> order;
  std::vector<std::shared_ptr<void>> owners;
};

class Engine {
 public:
  Engine(int threads, const std::vector<int>& cpus, std::uintptr_t heartbeat, std::uintptr_t abort)
      : pool_(threads, cpus, reinterpret_cast<std::atomic<std::int64_t>*>(heartbeat),
              reinterpret_cast<std::atomic<std::uint32_t>*>(abort)) {}

  void record() {
    if (recording_) throw std::runtime_error("already recording");
    recording_ = std::make_unique<Recording>();
  }
  Recording* recorded() {  // Python takes ownership
    if (!recording_) throw std::runtime_error("not recording");
    return recording_.release();
  }

  // Runs the command, or records it together with the owners of the memory that it uses.
  template <class... Owners>
  void submit(std::unique_ptr<Command> command, const Owners&... owners) {
    Command* const raw = command.get();
    if (!recording_) return run(&raw, 1);
    recording_->commands.push_back(std::move(command));
    recording_->order.push_back(raw);
    recording_->owners.push_back(std::make_shared<std::tuple<Owners...>>(owners...));
  }
  void replay(const Recording& recording) {
    run(recording.order.data(), static_cast<std::int64_t>(recording.order.size()));
  }
  int threads() const { return pool_.size(); }

  void join(nb::object group) {
    group_ = &nb::cast<GroupObject&>(group).group;
    owner_ = group;
  }
  Group* group() const { return group_; }  // null: alone

 private:
  void run(Command* const* commands, std::int64_t count) {
    bool done;
    {
      nb::gil_scoped_release release;
      done = pool_.run(commands, count);
    }
    if (PyErr_Occurred()) throw nb::python_error();  // of a signal's handler, during a wait
    if (group_ && group_->failed()) throw_group_error(group_->failure());
    if (!done) throw std::runtime_error("aborted");
  }
  static void throw_group_error(const std::string& reason) {
    const nb::object kind = nb::module_::import_("voltapile.kernels.group").attr("GroupError");
    PyErr_SetString(kind.ptr(), reason.c_str());
    throw nb::python_error();
  }

  Pool pool_;
  std::unique_ptr<Recording> recording_;
  Group* group_ = nullptr;
  nb::object owner_;  // of the group
};

void bind_group(nb::module_& module, nb::class_<Engine>& engine);     // module_group.cpp
void bind_families(nb::module_& module, nb::class_<Engine>& engine);  // module_families.cpp
void bind_file_rows(nb::module_& module);                             // module_file_rows.cpp

}  // namespace voltapile
