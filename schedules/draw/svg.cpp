#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <sluice/simulate.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

struct Colour {
  int red = 0, green = 0, blue = 0;
};

// Indexed by the first four ActionKinds.
constexpr std::array<Colour, 4> kColours = {Colour{38, 84, 160}, Colour{58, 125, 68},
                                            Colour{23, 135, 145}, Colour{124, 74, 156}};

// Six digits, as short as the value allows, where nothing else is asked for.
std::string svg_plain(double value, std::chars_format format = std::chars_format::general,
                      int precision = 6) {
  std::array<char, 32> text{};
  return {text.data(),
          std::to_chars(text.data(), text.data() + text.size(), value, format, precision).ptr};
}

// One decimal, as coordinates need no more.
std::string svg_number(double value) {
  std::string digits = svg_plain(value, std::chars_format::fixed, 1);
  if (digits.ends_with(".0")) digits.resize(digits.size() - 2);
  return digits;
}

// Printable ASCII that is safe as text.
std::string svg_escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '&') {
      safe += "&amp;";
    } else {
      safe += (c >= ' ' && c <= '~') ? c : '?';
    }
  }
  return safe;
}

// Chunk 0 has the full colour, the last chunk is lightened most; digits turn dark on light boxes.
struct Shade {
  std::string fill;
  bool light = false;
};
// Of F, B, I or W; distinct also without colour vision's red and green.
Shade shade_of(ActionKind kind, int chunk, int chunks) {
  const Colour base = kColours[at(kind)];
  const double lightening = chunks < 2 ? 0.15 : 0.62 * chunk / (chunks - 1);
  const auto lightened = [&](int part) {
    return std::to_string(static_cast<int>(std::lround(part + (255 - part) * lightening)));
  };
  return {
      "rgb(" + lightened(base.red) + "," + lightened(base.green) + "," + lightened(base.blue) + ")",
      lightening > 0.35};
}

class SvgCanvas {
 public:
  static constexpr double kFontSize = 11, kDigitWidth = 6.7;

  // `words` and `title`, which shows while the pointer is over the shape, are escaped already.
  void text(double x, double y, std::string_view words, std::string_view extra = "class=\"d\"") {
    body_ += "<text x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" ";
    body_.append(extra).append(">").append(words).append("</text>\n");
  }
  void rectangle(double x, double y, double width, double height, std::string_view fill,
                 std::string_view title = {}) {
    body_ += "<rect class=\"b\" x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" width=\"" +
             svg_number(width) + "\" height=\"" + svg_number(height) + "\" fill=\"";
    body_.append(fill).append("\"");
    if (title.empty()) {
      body_ += "/>\n";
    } else {
      body_.append("><title>").append(title).append("</title></rect>\n");
    }
  }
  // `data`: of a path.
  void path(std::string_view data, std::string_view attributes) {
    body_.append("<path d=\"").append(data).append("\" ").append(attributes).append("/>\n");
  }
  [[nodiscard]] std::string finish(double width, double height) const {
    const std::string size = svg_number(width) + " " + svg_number(height);
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + svg_number(width) +
           "\" height=\"" + svg_number(height) + "\" viewBox=\"0 0 " + size +
           "\" font-family=\"DejaVu Sans, Arial, sans-serif\" font-size=\"" +
           svg_number(kFontSize) +
           "\">\n<style>.w{fill:#fff}.d{fill:#111}.b{stroke:#fff;stroke-width:.8}"
           ".n{text-anchor:middle}</style>\n<rect width=\"100%\" height=\"100%\" "
           "fill=\"#fff\"/>\n" +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
};

constexpr double kRowHeight = 24, kRowGap = 4, kLeft = 64, kMargin = 16, kTitle = 34;
constexpr double kDigitWidth = SvgCanvas::kDigitWidth;
constexpr double kCurveHeight = 36;
constexpr const char* kReductionFill = "#d9822b";
constexpr double kLeastWidth = 640;
constexpr std::array<const char*, 4> kKindNames = {"forward", "backward", "backward, input",
                                                   "backward, weight"};

std::string percent(double share) { return svg_number(share * 100) + " %"; }

// "1.5 to 3 GB".
std::string bytes_text(const std::vector<std::int64_t>& peaks) {
  constexpr std::array<const char*, 6> kUnits = {" bytes", " kB", " MB", " GB", " TB", " PB"};
  const auto [least, most] = std::minmax_element(peaks.begin(), peaks.end());
  double unit = 1;
  std::size_t name = 0;
  for (; name + 1 < kUnits.size() && static_cast<double>(*most) >= 1000 * unit; ++name) {
    unit *= 1000;
  }
  const auto text = [&](std::int64_t bytes) {
    return svg_plain(static_cast<double>(bytes) / unit);
  };
  return (*least == *most ? "" : text(*least) + " to ") + text(*most) + kUnits[name];
}

class Picture {
 public:
  Picture(const Schedule& schedule, const Simulation& simulation, double most_width)
      : schedule_(schedule), simulation_(simulation), most_width_(most_width) {
    const Placement& placement = schedule.placement;
    chunk_of_.resize(at(placement.stages()));
    for (int rank = 0; rank < placement.ranks(); ++rank) {
      const std::vector<int>& stages = placement.stages_of(rank);
      chunks_ = std::max(chunks_, static_cast<int>(stages.size()));
      for (std::size_t i = 0; i < stages.size(); ++i) {
        chunk_of_[at(stages[i])] = static_cast<int>(i);
      }
    }
    scale_ = choose_scale();
  }

  std::string draw() {
    canvas_.text(kMargin, 20,
                 concat("<tspan font-weight=\"bold\">", svg_escaped(schedule_.name), "</tspan>: ",
                        schedule_.placement.ranks(), " ranks, ", schedule_.placement.stages(),
                        " stages, ", schedule_.micro_batches, " micro-batches"));
    const double rows_end = boxes();
    const double curves_end = simulation_.memory.empty() ? rows_end : curves(rows_end + 34);
    const double legend_y = curves_end + 34;
    const double legend_end = legend(legend_y);
    const double captions = caption(legend_y + 40);
    const double width =
        std::max({kLeft + simulation_.makespan * scale_, legend_end, captions, kLeastWidth}) +
        kMargin;
    return canvas_.finish(width, legend_y + 70);
  }

 private:
  // Pixels per unit of time.
  double choose_scale() const {
    double shortest = std::numeric_limits<double>::infinity();
    for (const auto& row : simulation_.timeline) {
      for (const SimulatedAction& each : row) {
        if (each.end > each.start) shortest = std::min(shortest, each.end - each.start);
      }
    }
    if (!(simulation_.makespan > 0) || !std::isfinite(shortest)) return 1;
    const auto digits = std::to_string(schedule_.micro_batches - 1).size();
    const double wanted = static_cast<double>(digits) * kDigitWidth + 5;
    const double least = (kLeastWidth - kLeft) / simulation_.makespan;
    const double scale = std::max(wanted / shortest, std::min(least, 40 / shortest));
    return std::min(scale, (most_width_ - kLeft - kMargin) / simulation_.makespan);
  }

  // "2F0 on rank 1: 3 to 4".
  static std::string title_of(std::size_t rank, const Action& action, double start, double end) {
    return concat(to_string(action), " on rank ", rank, ": ", svg_plain(start), " to ",
                  svg_plain(end));
  }

  void box(std::size_t rank, const SimulatedAction& action, double start, double end, double y,
           double height) {
    const int chunk = chunk_of_[at(action.action.stage)];
    // RECOMPUTE begins an input half.
    const bool again = action.action.kind == ActionKind::kRecompute;
    const ActionKind kind = again ? ActionKind::kBackwardInput : action.action.kind;
    const Shade shade = shade_of(kind, chunk, chunks_);
    used_[at(kind)] = true;
    const double x = kLeft + start * scale_;
    const double width = (end - start) * scale_;
    if (width < 0.1) return;
    canvas_.rectangle(x, y, width, height, shade.fill,
                      title_of(rank, action.action, action.start, action.end));
    const std::string digits = std::to_string(action.action.micro_batch);
    if (width < static_cast<double>(digits.size()) * kDigitWidth) return;
    canvas_.text(x + width / 2, y + height / 2 + 4, digits,
                 shade.light ? "class=\"d n\"" : "class=\"w n\"");
  }

  static double top_of(std::size_t row) {
    return kTitle + static_cast<double>(row) * (kRowHeight + kRowGap);
  }

  // The axis below `rows` rows. Returns where they end.
  double axis(std::size_t rows) {
    const double end = top_of(rows), y = end + 10;
    const double right = kLeft + simulation_.makespan * scale_;
    canvas_.path(concat("M", svg_number(kLeft), " ", svg_number(y - 4), "H", svg_number(right)),
                 "stroke=\"#888\"");
    canvas_.text(kLeft, y + 9, "time 0");
    canvas_.text(right, y + 9, svg_plain(simulation_.makespan), "class=\"d\" text-anchor=\"end\"");
    return end;
  }

  double boxes() {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      canvas_.text(kMargin, top_of(rank) + kRowHeight / 2 + 4, concat("rank ", rank));
      row(rank, top_of(rank));
      if (!simulation_.reductions.empty()) reductions(rank, top_of(rank));
    }
    messages();
    return axis(schedule_.ranks.size());
  }

  // From the end of what made a tensor to where it arrives, if that takes time.
  void messages() {
    std::string lines;
    for (const SimulatedMessage& each : simulation_.transfers) {
      if (!(each.arrives > each.made)) continue;
      const auto middle = [&](int rank) { return top_of(at(rank)) + kRowHeight / 2; };
      lines +=
          concat("M", svg_number(kLeft + each.made * scale_), " ", svg_number(middle(each.from)),
                 "L", svg_number(kLeft + each.arrives * scale_), " ", svg_number(middle(each.to)));
    }
    if (lines.empty()) return;
    canvas_.path(lines,
                 "class=\"m\" fill=\"none\" stroke=\"#333\" stroke-width=\".6\" "
                 "stroke-opacity=\".55\"");
    has_messages_ = true;
  }

  // The bytes that each rank holds over time, all in one scale. Returns where the curves end.
  double curves(double top) {
    std::int64_t most = 1;
    for (const std::int64_t peak : simulation_.peak_bytes) most = std::max(most, peak);
    canvas_.text(kMargin, top + 4, concat("bytes held, from 0 to ", bytes_text({most})));
    for (std::size_t rank = 0; rank < simulation_.memory.size(); ++rank) {
      const double base = top + 12 + static_cast<double>(rank + 1) * (kCurveHeight + kRowGap);
      canvas_.text(kMargin, base - kCurveHeight / 2 + 4, concat("rank ", rank));
      std::string line = concat("M", svg_number(kLeft), " ", svg_number(base));
      for (const MemoryStep& step : simulation_.memory[rank]) {
        const double share = static_cast<double>(step.bytes) / static_cast<double>(most);
        line += concat("H", svg_number(kLeft + step.time * scale_), "V",
                       svg_number(base - share * kCurveHeight));
      }
      line += concat("H", svg_number(kLeft + simulation_.makespan * scale_), "V", svg_number(base),
                     "z");
      canvas_.path(line, "fill=\"#ccd6e4\" stroke=\"#26549f\" stroke-width=\".8\"");
    }
    return top + 12 + static_cast<double>(simulation_.memory.size()) * (kCurveHeight + kRowGap);
  }

  // A rank's timeline holds the actions of its computing steps in order.
  void row(std::size_t rank, double y) {
    const std::vector<SimulatedAction>& timeline = simulation_.timeline[rank];
    std::size_t next = 0;
    for (const Step& step : schedule_.ranks[rank]) {
      if (!is_compute(step.action.kind) && step.action.kind != ActionKind::kRecompute) continue;
      const SimulatedAction& first = timeline[next++];
      if (!step.overlapped) {
        box(rank, first, first.start, first.end, y, kRowHeight);
        continue;
      }
      const SimulatedAction& second = timeline[next++];
      if (second.start >= first.end) {  // one after the other
        box(rank, first, first.start, first.end, y, kRowHeight);
        box(rank, second, second.start, second.end, y, kRowHeight);
        continue;
      }
      const double start = std::min(first.start, second.start);
      const double end = std::max(first.end, second.end);
      box(rank, first, start, end, y, kRowHeight / 2);
      box(rank, second, start, end, y + kRowHeight / 2, kRowHeight / 2);
    }
  }

  // Concurrent with compute, so a bar along the row's lower edge.
  void reductions(std::size_t rank, double y) {
    for (const SimulatedAction& each : simulation_.reductions[rank]) {
      const double width = (each.end - each.start) * scale_;
      if (width < 0.1) continue;
      canvas_.rectangle(kLeft + each.start * scale_, y + kRowHeight - 4, width, 4, kReductionFill);
    }
  }

  // Returns where it ends.
  double legend(double y) {
    double x = kLeft;
    const auto entry = [&](const std::string& fill, const char* stroke, const std::string& words) {
      canvas_.path(concat("M", svg_number(x), " ", svg_number(y), "h16v16h-16z"),
                   concat("fill=\"", fill, "\" stroke=\"", stroke, "\""));
      x += 16;
      if (words.empty()) return;
      canvas_.text(x + 5, y + 12, words);
      x += 22 + static_cast<double>(words.size()) * kDigitWidth;
    };
    const int shown = std::min(chunks_, kMostShades);
    for (std::size_t kind = 0; kind < kKindNames.size(); ++kind) {
      if (!used_[kind]) continue;
      for (int i = 0; i < shown; ++i) {
        const int chunk = shown < 2 ? 0 : i * (chunks_ - 1) / (shown - 1);
        const bool last = i + 1 == shown;
        entry(shade_of(static_cast<ActionKind>(kind), chunk, chunks_).fill, "#fff",
              last ? kKindNames[kind] : "");
      }
    }
    if (!simulation_.reductions.empty()) entry(kReductionFill, "#fff", "gradient sum");
    entry("#fff", "#888", "idle");
    if (has_messages_) {
      canvas_.text(x, y + 12, "lines: messages");
      x += 16 * kDigitWidth;
    }
    if (chunks_ > 1) {
      const std::string words = concat("shades: chunk 0 (dark) to ", chunks_ - 1, " (light)");
      canvas_.text(x, y + 12, words);
      x += static_cast<double>(words.size()) * kDigitWidth;
    }
    return x;
  }

  // Returns where it ends.
  double caption(double y) {
    const auto [least, most] =
        std::minmax_element(simulation_.peak_in_flight.begin(), simulation_.peak_in_flight.end());
    std::string words = "bubble " + percent(simulation_.bubble_makespan) + " of the makespan, " +
                        percent(simulation_.bubble_span) + " of the longest own span; peak memory ";
    words += *least == *most ? std::to_string(*most) : concat(*least, " to ", *most);
    words += chunks_ > 1 ? " chunks of a micro-batch per rank" : " micro-batches per rank";
    if (!simulation_.peak_bytes.empty()) words += ", " + bytes_text(simulation_.peak_bytes);
    canvas_.text(kLeft, y + 6, words);
    return kLeft + static_cast<double>(words.size()) * kDigitWidth;
  }

  static constexpr int kMostShades = 4;

  const Schedule& schedule_;
  const Simulation& simulation_;
  double most_width_;
  std::vector<int> chunk_of_;  // [stage] among its rank's stages
  int chunks_ = 1;
  double scale_ = 1;
  std::array<bool, 4> used_{};
  bool has_messages_ = false;
  SvgCanvas canvas_;
};

// One entry of the timeline per compute action, of which there are few enough.
void require_drawable(const Schedule& schedule, const Simulation& simulation) {
  bool same = schedule.ranks.size() == simulation.timeline.size() &&
              schedule.ranks.size() == simulation.peak_in_flight.size();
  std::size_t total = 0;
  for (std::size_t rank = 0; same && rank < schedule.ranks.size(); ++rank) {
    std::size_t actions = 0;
    for (const Step& step : schedule.ranks[rank]) {
      if (is_compute(step.action.kind)) actions += step.overlapped ? 2 : 1;
    }
    same = actions == simulation.timeline[rank].size();
    total += actions;
  }
  if (!same) {
    refuse("picture of '", schedule.name, "': the simulation is not of this schedule");
  }
  if (total > kMaxSvgActions) {
    refuse("picture of '", schedule.name, "': ", total, " actions; at most ", kMaxSvgActions,
           " are legal, a trace holds more");
  }
}

}  // namespace

std::string draw_svg(const Schedule& schedule, const Simulation& simulation, int most_width) {
  require_drawable(schedule, simulation);
  return Picture(schedule, simulation, std::max<double>(most_width, kLeastWidth)).draw();
}

}  // namespace sluice
