// States of the program and its data source between memory and the files of a save.
#pragma once

#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {

// States as a save writes them.
class SavedStates {
 public:
  // Throws Error(kUsage): the text is no JSON, a tensor's bytes are not those of its type and
  // shape.
  void add(const std::string& name, ProgramState state);
  [[nodiscard]] const std::map<std::string, std::string>& json() const { return json_; }
  // Named "<state>/<tensor>"; views of this object's memory.
  [[nodiscard]] std::span<const NamedTensor> tensors() const { return tensors_; }

 private:
  std::map<std::string, std::string> json_;
  std::deque<HostTensor> values_;
  std::vector<NamedTensor> tensors_;
};

// Collective. Rank 0 reads the states of the save in `directory`; every rank gets them.
[[nodiscard]] std::map<std::string, ProgramState> read_states(
    Collectives& world, const std::filesystem::path& directory, const SaveState& state);

}  // namespace sluice
