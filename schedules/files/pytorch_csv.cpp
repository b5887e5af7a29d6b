#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>

#include "schedules/files/file_text.hpp"
#include "schedules/model/actions.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

constexpr std::string_view kCsvReader = "schedule CSV";

bool is_kind_letter(char c) { return (c >= 'A' && c <= 'Z') || c == '_'; }

// Where a cell stands, from 1 as in a spreadsheet.
struct Position {
  std::size_t row = 1, column = 1;
};

template <class... Parts>
[[noreturn]] void fail_at(const Position& at, const Parts&... what) {
  refuse(kCsvReader, ", row ", at.row, ", column ", at.column, ": ", what...);
}

// Calls visit(position, cell) for every cell, also the empty ones.
template <class Visit>
void for_each_cell(std::string_view text, const Visit& visit) {
  Position at;
  while (!text.empty()) {
    const std::size_t length = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    if (row.ends_with('\r')) row.remove_suffix(1);
    at.column = 1;
    for (bool more = true; more; ++at.column) {
      const std::size_t comma = row.find(',');
      more = comma != std::string_view::npos;
      visit(at, row.substr(0, comma));
      if (more) row.remove_prefix(comma + 1);
    }
    ++at.row;
  }
}

// Calls visit(kind) for each run of letters in a cell: its kinds.
template <class Visit>
void for_each_kind(std::string_view cell, const Visit& visit) {
  for (std::size_t i = 0; i < cell.size();) {
    std::size_t end = i;
    while (end < cell.size() && is_kind_letter(cell[end])) ++end;
    if (end > i) visit(i, cell.substr(i, end - i));
    i = std::max(end, i + 1);
  }
}

CsvAlphabet detect(std::string_view text) {
  Position input_half;
  bool whole = false, input = false, weight = false;
  Position whole_at;
  for_each_cell(text, [&](const Position& at, std::string_view cell) {
    if (!is_action_text(cell)) return;
    for_each_kind(cell, [&](std::size_t, std::string_view kind) {
      if (kind == "BW" && !std::exchange(whole, true)) whole_at = at;
      if (kind == "I" && !std::exchange(input, true)) input_half = at;
      weight = weight || kind == "W";
    });
  });
  if (whole && input) {
    fail_at(whole_at, "BW is of PyTorch's older alphabet (F B W BW), but row ", input_half.row,
            ", column ", input_half.column,
            " has I of the current one (F I W B); legal is one of the two");
  }
  return whole || (weight && !input) ? CsvAlphabet::kOlder : CsvAlphabet::kCurrent;
}

// The cell with its kinds renamed, e.g. from older to current.
std::string renamed(std::string_view cell, std::string_view from_input, std::string_view to_input,
                    std::string_view from_whole, std::string_view to_whole) {
  std::string text;
  std::size_t copied = 0;
  for_each_kind(cell, [&](std::size_t at, std::string_view kind) {
    text += cell.substr(copied, at - copied);
    text += kind == from_input ? to_input : kind == from_whole ? to_whole : kind;
    copied = at + kind.size();
  });
  text += cell.substr(copied);
  return text;
}

constexpr std::string_view kWait = "WAIT_";

// A wait as what it waits for: "0SEND_F0" of "0WAIT_SEND_F0"; empty: the cell is none.
std::string waited_for(std::string_view cell) {
  const std::size_t digits = std::min(cell.find_first_not_of("0123456789"), cell.size());
  if (!cell.substr(digits).starts_with(kWait)) return "";
  return std::string(cell.substr(0, digits)) + std::string(cell.substr(digits + kWait.size()));
}

std::string wait_of(const Action& action) {
  std::string text = to_string(action);
  return text.insert(text.find_first_not_of("0123456789"), kWait);
}

bool known_to_pytorch(ActionKind kind) {
  return kind != ActionKind::kReduceTied && kind != ActionKind::kOptimizer &&
         kind != ActionKind::kRecompute && !is_move(kind);
}

// The waits of a file: each comes in its row after what it waits for.
class Waits {
 public:
  void begin_row() {
    open_.clear();
    open_sum_ = -1;
  }

  // A send or a sum, and a wait for one. `at` is its place.
  void start(const Position& at, const Action& action) {
    const bool sum = action.kind == ActionKind::kReduceGrad;
    ++(sum ? sums_ : sends_);
    open_.insert(key_of(action));
    if (!sum) return;
    if (open_sum_ >= 0 && !second_sum_) second_sum_ = {at, action.stage, open_sum_};
    open_sum_ = action.stage;
  }
  void end(const Position& at, const Action& action) {
    if (!is_send(action.kind) && action.kind != ActionKind::kReduceGrad) {
      fail_at(at, wait_of(action), " waits for no send and no sum; legal are WAIT_SEND_F, ",
              "WAIT_SEND_B and WAIT_REDUCE_GRAD");
    }
    if (open_.erase(key_of(action)) == 0) {
      fail_at(at, wait_of(action), " waits for ", action,
              ", which does not come before it in its row, or has a wait already");
    }
    if (!is_send(action.kind)) open_sum_ = -1;
    ++(is_send(action.kind) ? waited_sends_ : waited_sums_);
  }
  [[nodiscard]] std::int64_t count() const { return waited_sends_ + waited_sums_; }

  // After the last row: messages and sums have a wait each, or none has.
  void require_all() const {
    if (waited_sends_ > 0 && waited_sends_ < sends_) {
      refuse(kCsvReader, ": ", sends_ - waited_sends_, " of ", sends_,
             " sends have no wait (WAIT_SEND_F, WAIT_SEND_B); legal is one for each, or none");
    }
    if (waited_sums_ == 0) return;
    if (second_sum_) {
      fail_at(second_sum_->at, "stage ", second_sum_->stage, "'s REDUCE_GRAD begins before ",
              second_sum_->open,
              "WAIT_REDUCE_GRAD; a rank sums one stage "
              "at a time");
    }
    if (waited_sums_ < sums_) {
      refuse(kCsvReader, ": ", sums_ - waited_sums_, " of ", sums_,
             " REDUCE_GRAD have no WAIT_REDUCE_GRAD; legal is one for each, or none");
    }
  }

 private:
  using Key = std::tuple<ActionKind, std::int32_t, std::int32_t>;
  static Key key_of(const Action& action) {
    return {action.kind, action.stage, action.micro_batch};
  }
  struct SecondSum {
    Position at;
    int stage = 0, open = 0;
  };

  std::set<Key> open_;
  int open_sum_ = -1;  // the stage; -1: none
  std::optional<SecondSum> second_sum_;
  std::int64_t sends_ = 0, sums_ = 0, waited_sends_ = 0, waited_sums_ = 0;
};

class CsvReader {
 public:
  CsvReader(std::string_view text, std::string_view name, CsvAlphabet alphabet) : text_(text) {
    result_.schedule.name = name;
    result_.schedule.micro_batches = 0;
    detects_ = alphabet == CsvAlphabet::kDetect;
    result_.alphabet = detects_ ? detect(text) : alphabet;
  }

  PytorchCsv read() {
    for_each_cell(text_, [this](const Position& at, std::string_view cell) { add(at, cell); });
    place();
    find_forward_only(result_.schedule);
    if (result_.messages > 0) check_messages();
    require_all_waits();
    return std::move(result_);
  }

 private:
  void add(const Position& at, std::string_view cell) {
    std::vector<std::vector<Step>>& ranks = result_.schedule.ranks;
    if (ranks.size() < at.row) {
      ranks.emplace_back();
      waits_.begin_row();
    }
    if (cell.empty()) return;
    if (const std::string awaited = waited_for(cell); !awaited.empty()) {
      if (result_.alphabet != CsvAlphabet::kCurrent) {
        fail_at(at, quoted_excerpt(cell) + " is a wait, which this alphabet does not have");
      }
      waits_.end(at, parse(at, awaited).action);
      require_action_count(kCsvReader,
                           computes_ + result_.messages + result_.sharding + waits_.count());
      return;
    }
    const Step step = parse(at, cell);
    if (is_send(step.action.kind) || step.action.kind == ActionKind::kReduceGrad) {
      waits_.start(at, step.action);
    }
    note(at, step.action);
    if (step.overlapped) note(at, *step.overlapped);
    ranks.back().push_back(step);
  }

  Step parse(const Position& at, std::string_view cell) const {
    if (!is_action_text(cell)) {
      fail_at(at, quoted_excerpt(cell) + " is no action; legal are cells such as 0F0, 2I1, 2W1, " +
                      "1B3, 0SEND_F0, (0F7;7B3)OVERLAP_F_B and empty ones");
    }
    Step step;
    try {
      if (result_.alphabet == CsvAlphabet::kOlder) {
        refuse_current(at, cell);
        step = parse_step(renamed(cell, "B", "I", "BW", "B"));
      } else {
        step = parse_step(cell);
      }
    } catch (const Error& error) {
      fail_at(at, error.what());
    }
    if (!known_to_pytorch(step.action.kind)) {
      fail_at(at, quoted_excerpt(cell), ": PyTorch has no action ", name_of(step.action.kind));
    }
    return step;
  }

  static void refuse_current(const Position& at, std::string_view cell) {
    for_each_kind(cell, [&](std::size_t, std::string_view kind) {
      if (kind != "I") return;
      fail_at(at, quoted_excerpt(cell), " has I; the older alphabet writes B for the input half ",
              "and BW for the whole backward");
    });
  }

  // Where the stage lives, how many micro-batches there are.
  void note(const Position& at, const Action& action) {
    ++(is_compute(action.kind)   ? computes_
       : is_message(action.kind) ? result_.messages
                                 : result_.sharding);
    require_action_count(kCsvReader,
                         computes_ + result_.messages + result_.sharding + waits_.count());
    if (!is_compute(action.kind)) return;
    const auto stage = static_cast<std::size_t>(action.stage);
    if (stage >= most_stages()) {
      fail_at(at, action, " names stage ", action.stage, ", but so short a file has fewer than ",
              most_stages(), " actions; stages count from 0 without gaps");
    }
    if (stage >= stage_to_rank_.size()) stage_to_rank_.resize(stage + 1, -1);
    const int rank = static_cast<int>(at.row) - 1;
    int& owner = stage_to_rank_[stage];
    if (owner >= 0 && owner != rank) {
      fail_at(at, action, " is on rank ", rank, ", but row ", owner + 1, " computes stage ",
              action.stage, " as well; a stage has one rank");
    }
    owner = rank;
    if (action.micro_batch >= kMaxScheduleActions) {
      fail_at(at, action, " names micro-batch ", action.micro_batch, "; at most ",
              kMaxScheduleActions, " are legal");
    }
    result_.schedule.micro_batches =
        std::max(result_.schedule.micro_batches, action.micro_batch + 1);
  }

  // A cell takes at least 3 bytes and a comma.
  [[nodiscard]] std::size_t most_stages() const { return text_.size() / 4 + 1; }

  void place() {
    Schedule& schedule = result_.schedule;
    for (std::size_t stage = 0; stage < stage_to_rank_.size(); ++stage) {
      if (stage_to_rank_[stage] >= 0) continue;
      refuse(kCsvReader, ": no row computes stage ", stage, ", but one ", "computes stage ",
             stage_to_rank_.size() - 1, "; stages count from 0 without gaps");
    }
    for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      const std::vector<Step>& steps = schedule.ranks[rank];
      const bool computes = std::any_of(steps.begin(), steps.end(), [](const Step& step) {
        return is_compute(step.action.kind);
      });
      if (!computes) fail_at({rank + 1, 1}, "the row computes nothing; every rank needs a stage");
    }
    if (computes_ == 0) {
      refuse(kCsvReader, ": the text is empty: there is no such file, or nothing in it");
    }
    require_enough_actions(kCsvReader, static_cast<std::int64_t>(stage_to_rank_.size()),
                           schedule.micro_batches, computes_);
    schedule.placement =
        Placement::custom(static_cast<int>(schedule.ranks.size()), std::move(stage_to_rank_));
  }

  void require_all_waits() {
    result_.waits = waits_.count();
    waits_.require_all();
    const bool without = result_.messages > 0 && result_.waits == 0;
    if (detects_ && without && result_.alphabet == CsvAlphabet::kCurrent) {
      result_.alphabet = CsvAlphabet::kNoWaits;
    }
  }

  // Proves the messages, then drops them.
  void check_messages() {
    if (const auto violation = check(result_.schedule)) {
      if (violation->rank < 0 || violation->position < 0) {
        refuse(kCsvReader, ": ", violation->message);
      }
      fail_at(position_of(*violation), violation->message);
    }
    for (std::vector<Step>& steps : result_.schedule.ranks) {
      std::erase_if(steps, [](const Step& step) { return is_message(step.action.kind); });
    }
  }

  // Of the row's n-th cell that is not empty.
  [[nodiscard]] Position position_of(const Violation& violation) const {
    Position found{static_cast<std::size_t>(violation.rank) + 1, 1};
    int position = 0;
    for_each_cell(text_, [&](const Position& at, std::string_view cell) {
      if (at.row != found.row || cell.empty() || !waited_for(cell).empty()) return;
      if (position++ == violation.position) found.column = at.column;
    });
    return found;
  }

  std::string_view text_;
  bool detects_ = false;
  Waits waits_;
  PytorchCsv result_;
  std::vector<int> stage_to_rank_;
  std::int64_t computes_ = 0;
};

}  // namespace

PytorchCsv parse_pytorch_csv(std::string_view text, std::string_view name, CsvAlphabet alphabet) {
  require_file_size(kCsvReader, text);
  return CsvReader(text, name, alphabet).read();
}

namespace {

// One row: cells, and the waits that the current alphabet has between them.
class Row {
 public:
  Row(std::string_view schedule, CsvAlphabet alphabet) : schedule_(schedule), alphabet_(alphabet) {}

  void add(const Step& step) {
    const Action& action = step.action;
    if (!known_to_pytorch(action.kind)) {
      refuse("schedule '", schedule_, "': PyTorch has no action ", action);
    }
    const std::string cell = to_string(step);
    put(alphabet_ == CsvAlphabet::kOlder ? renamed(cell, "I", "B", "B", "BW") : cell);
    if (alphabet_ != CsvAlphabet::kDetect && alphabet_ != CsvAlphabet::kCurrent) return;
    if (is_send(action.kind)) {
      if (action.kind == ActionKind::kSendForward) {
        open_[{action.stage, action.micro_batch}] = sent_.size();
      }
      sent_.push_back(action);
    }
    if (action.kind == ActionKind::kReduceGrad) put(wait_of(action));
    if (step.overlapped) end_activation(*step.overlapped);
    end_activation(action);
  }

  std::string finish() {
    for (const Action& each : sent_) {
      if (each.stage >= 0) put(wait_of(each));
    }
    return std::move(text_) + '\n';
  }

 private:
  void put(const std::string& cell) {
    if (!text_.empty()) text_ += ',';
    text_ += cell;
  }

  // The activation of a micro-batch has arrived once its gradient is back.
  void end_activation(const Action& action) {
    if (!makes_gradient(action.kind)) return;
    const auto found = open_.find({action.stage, action.micro_batch});
    if (found == open_.end()) return;
    put(wait_of(sent_[found->second]));
    sent_[found->second].stage = -1;  // has its wait
    open_.erase(found);
  }

  std::string_view schedule_;
  CsvAlphabet alphabet_;
  std::string text_;
  std::vector<Action> sent_;
  std::map<std::pair<int, int>, std::size_t> open_;  // [stage, micro-batch] activation in sent_
};

}  // namespace

std::string to_pytorch_csv(const Schedule& schedule, CsvAlphabet alphabet) {
  std::string text;
  for (const std::vector<Step>& steps : schedule.ranks) {
    Row row(schedule.name, alphabet);
    for (const Step& step : steps) row.add(step);
    text += row.finish();
  }
  return text;
}

}  // namespace sluice
